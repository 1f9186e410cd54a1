"""How the bundled recall model is made: corpus, tokenizer, training, export, evaluation."""
