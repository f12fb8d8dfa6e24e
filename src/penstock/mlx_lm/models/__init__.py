"""Where mlx-lm has its models: `cache` for prompts that were read before, `base` for what `load` returns."""
