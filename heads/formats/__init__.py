"""How a drafter's folder looks to others: one module per format, each a two-way table used by saving and loading alike.

A format module has:
    names(drafter)         our tensor name -> the format's, one to one, for every tensor we store
    canonical(name)        (optional) other spellings of a tensor name found in files -> the one in names()
    extras(drafter)        (optional) tensors the engines want beside them (maps, copies, zeros), derived from ours
    in_file(drafter, tensors), in_memory(drafter, tensors)   (optional) all tensors as folders have them and as a model in memory does
    config(drafter)        the keys of config.json that engines read
    read(config)           (optional) the keys of such a config.json in the form in which they can be compared with config()
    ARCHITECTURES          (optional) the names that engines call it by, where there are several
    beside(drafter)        (optional) further files of the folder: name -> text
    serving(drafter, target, folder, guesses)   (optional) the command of each engine that loads it: heads/serving.py
and where others than we write such folders:
    recognises(config)     whether a config.json without our own block is of this format, and so of no other
    arguments(config, tensors, shape)   head name and constructor arguments read back from such a folder

A drafter names its format (``Drafter.format``), a folder of others' is asked of every module here: no list of them exists elsewhere.

``arguments`` goes through every key that changes what an engine computes: taken over, or refused.
"""
