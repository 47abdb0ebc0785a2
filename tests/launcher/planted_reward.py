"""The reward function of `planted_stalls.py`, in a module that a worker imports quickly."""

import threading


def deadlocked_reward(prompt, completions, prompt_ids, completion_ids, **data):
    lock = threading.Lock()
    with lock:
        lock.acquire()  # guilty: reward_deadlock
