"""The planted-fact session: four ways to hold a budget, one question at the end."""
