"""A prompt as tokens and blocks: where each is, what it is called, which are resident."""
