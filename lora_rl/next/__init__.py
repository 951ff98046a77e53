"""NExt: extrapolating the trajectory of the adapters, accepted only by measurement. Needs torch and nothing else."""
