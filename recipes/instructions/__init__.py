"""How the weights are made by which standing instructions are recognized, and the texts for it.

`standing_N.txt` has instructions of the author N, one a line; `others_N.txt` has texts of the same
author that are alike and are none: requests to be carried out once, questions, what people do.
`standing_de.txt` and so on are the same in other languages, by one author.
"""
