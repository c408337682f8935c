"""``gradientmail demo``: processes that share only a mailbox train one language model, on the text of Python itself."""
