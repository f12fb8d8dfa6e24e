"""Model files: checkpoints in safetensors, and where they come from. Nothing here knows a model family."""
