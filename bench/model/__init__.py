"""The corpus of the bundled model, from which the benches draw sessions, too."""
