"""Several llama-servers of one model behind one proxy: an engine each, and what is between them."""
