"""Embeds questions before a plan and blocks after a reply."""
