"""The commands: `python -m experiments.NAME --config=configs/X.py --workdir=DIR`."""
