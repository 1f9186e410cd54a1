"""What the model itself looks at."""
