"""Effects of heads that are ablated one at a time: on tasks or texts (`run_ablate`), and the arms that answer
labelled examples (`run_labelled_ablate`).
"""
