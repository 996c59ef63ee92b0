"""Speed and perplexity of rounded weights."""
