"""Effects of heads that are ablated one at a time: on tasks or texts (`single_heads`), and the arms that answer
labelled examples (`labelled_arms`).
"""
