"""What a model reads, needs and does: survey, plan, trace, expert routes, perplexity, verification."""
