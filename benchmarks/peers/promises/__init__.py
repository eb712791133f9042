"""Which sentences of mpjax's acceptance list hold for each framework, found by running a small loop of each.

One file for each framework has what `loop.Framework` describes, all in float16 and as the framework's own documentation
has it; `judge` has the sentences.
"""
