"""The methods of the Cloud TPU API over a world, served as gRPC and as REST."""
