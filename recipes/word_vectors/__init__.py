"""How the word vectors are made that the proxy embeds texts with by default.

`start` makes a vector of each word piece from all-MiniLM-L6-v2. `senses` reads WordNet, `texts`
writes texts with its words, `teacher` encodes them, and `train` changes the vectors of the pieces
until their sums are alike where the encoder finds texts alike, and stores the table. `similar`
finds the words whose vectors are close, and stores these pairs.

A line of `facts.txt` is a statement and questions about it; one of `statements.txt` or
`questions.txt` stands alone.
"""
