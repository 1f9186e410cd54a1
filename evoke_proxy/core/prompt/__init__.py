"""Prompts as tokens and blocks: renderings, segmentation and residency."""
