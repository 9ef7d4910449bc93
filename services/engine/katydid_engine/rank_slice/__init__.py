"""One rank of a plan alone on one device: the engine's model, runner and kernels, with the other ranks left out."""
