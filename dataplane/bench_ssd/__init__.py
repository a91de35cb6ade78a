"""What the SSD tier costs beside its device: ``python -m dataplane.bench_ssd --folder FOLDER [--output json]``.

The device alone (O_DIRECT, same block size, same number of threads), the cipher alone on one thread, and the whole tier
are measured in turns in one run, so that noise of the machine meets all of them; what counts is their ratio.
"""
