"""Text encoders: the built-in word vectors, and encoders in ONNX format and their download."""
