"""Settings of the experiments: a file each, with the result to expect."""
