"""Whatever guesses tokens. A wrong guess costs time and nothing else."""
