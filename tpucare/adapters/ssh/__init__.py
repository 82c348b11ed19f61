"""SSH to workers behind `ports.Remote`."""
