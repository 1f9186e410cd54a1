"""How the word vectors are made that the proxy embeds texts with by default.

`start` makes a vector of each word piece from all-MiniLM-L6-v2. `senses` reads WordNet, `texts`
writes texts with it, `teacher` has the encoder's vectors of these, and `train` changes the vectors
of the pieces until their sums are alike where the encoder finds texts alike, and stores the table.

The sentences of `facts.txt` have a statement and questions about it a line; those of
`statements.txt` and `questions.txt` stand alone.
"""
