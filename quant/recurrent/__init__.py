"""What layers remember between passes besides keys and values, and how drafts branch off it and are taken back.

``state_store.py`` is the interface that every kind of layer implements; keys and values implement it too
(``quant/attention/kv_cache.py``). ``node_states.py`` keeps one state per node for any recurrent or convolution layer of
transformers; ``constant_decay.py`` needs no states per node for linear attention whose decay is constant.
"""
