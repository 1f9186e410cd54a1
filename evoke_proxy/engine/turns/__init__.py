"""One turn from the request to the end of its reply: a slot, a plan, the books."""
