"""How much does a conversation on a budget recall, compared with one without a budget?

* `sessions`: the messages and questions; seeds for tuning and for reporting
* `arms`: policies and budgets
* `stack`: a patched llama-server and the proxy in front of it
* `drive`: one session under one arm, turn by turn, with the token counts of every turn
* `plan`, `journal`, `work`: what to run, what has run, and the runner
* `stats`, `summary`, `tables`, `misses`, `plots`: the evaluation"""
