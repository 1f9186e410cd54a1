"""How much a conversation on a budget still knows, beside the same conversation without one.

* `sessions`: what is said, in which order, and what is asked; seeds for tuning and for reporting
* `arms`: under which policy and budget
* `stack`: a patched llama-server and the proxy in front of it
* `drive`: one session under one arm, turn by turn, with the books of every turn
* `plan`, `journal`, `work`: what is to be run, what has been, and the running
* `stats`, `summary`, `tables`, `misses`, `plots`, `published`: what comes of it
"""
