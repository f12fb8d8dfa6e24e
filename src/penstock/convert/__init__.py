"""Making MLX checkpoints: Hugging Face and GGUF models renamed, reshaped and quantized, row by row."""
