"""Text embedders: the built-in word vectors, and encoders in ONNX format."""
