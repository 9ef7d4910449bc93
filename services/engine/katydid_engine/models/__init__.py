"""The models this engine serves, one family a file; ``katydid_engine.loader.load_model`` brings a folder to life.

>>> model = load_model(Path("smollm2"))
>>> cache = model.new_kv_cache(num_pages=128)
>>> hidden = model.forward(batch, cache)                              # [T, hidden], after the final norm
>>> logits = model.logits(hidden[batch.cu_q_lens[1:].long() - 1])     # [S, vocab], fp32
"""
