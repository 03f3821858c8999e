"""What a notebook says of its machine: loudly where it is a CPU."""

import dataclasses
import html
import platform

import jax

from specjax.report import machine

TPU = machine.Machine({"jax": "0.7.2"}, "tpu", "TPU v5 lite", 4, 16_000_000_000)


def test_an_accelerator_is_named_without_alarm():
    assert repr(TPU) == "jax 0.7.2\n4 x TPU v5 lite (tpu), 16.0 GB each"
    assert TPU.alarm == "" and "background" not in TPU._repr_html_()
    assert "4 x TPU v5 lite" in TPU._repr_html_()
    unknown = dataclasses.replace(TPU, memory=None)
    assert repr(unknown).endswith("(tpu)")


def test_a_cpu_is_said_loudly():
    own = dataclasses.replace(TPU, platform="cpu", kind="cpu", devices=1)
    assert repr(own).startswith("NO TPU AND NO GPU WAS FOUND")
    assert repr(own).endswith("1 x cpu (cpu), 16.0 GB of memory")
    text = own._repr_html_()
    assert html.escape(own.alarm) in text and text.count("NO TPU") == 1


def test_this_machine():
    own = machine.here()
    assert own.versions["python"] == platform.python_version()
    assert own.versions["jax"] == jax.__version__
    assert own.devices == jax.device_count() and own.platform == "cpu" and own.alarm
    assert own.memory is None or own.memory > 1e8
