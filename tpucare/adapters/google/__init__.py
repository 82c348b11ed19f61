"""The Cloud TPU API behind `ports.Cloud`."""
