"""From a served adapter file to the target modules of the model, on CPU and CUDA."""
