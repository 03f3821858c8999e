"""Proof that rules write the target's law: exact laws beside many samples."""
