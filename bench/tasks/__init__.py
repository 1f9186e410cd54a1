"""Tasks of one difficulty each: many values, several hops, pronouns, inference and others."""
