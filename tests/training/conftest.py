"""Small models that are compiled to be run a few times."""

from tests.helpers import quick_compile  # noqa: F401
