"""W&B sweeps: fleets whose slots run `wandb agent`."""
