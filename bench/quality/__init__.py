"""How much does a conversation on a budget recall, compared with one without a budget?

* `sessions`: the messages and questions; seeds for tuning and for reporting
* `plan`: policies, budgets and cells: what to run
* `stack`: a patched llama-server and the proxy in front of it
* `drive`: one session under one arm, turn by turn, with the token counts of every turn
* `work`: what has run, and the runner
* `summary`, `report`: the evaluation, in numbers and as tables"""
