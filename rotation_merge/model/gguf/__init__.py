"""Models in llama.cpp's GGUF files: read as checkpoints, tensor by tensor, and written."""
