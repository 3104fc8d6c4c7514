"""How a drafter's folder looks to others: one module per format, each a two-way table used by saving and loading alike.

A format module has:
    names(drafter)         our tensor name -> the format's, one to one, for every tensor we store
    canonical(name)        (optional) other spellings of a tensor name found in files -> the one in names()
    extras(drafter)        tensors the engines want beside them (maps, copies, zeros), derived from ours
    config(drafter)        the keys of config.json that engines read
    recognises(config)     whether a config.json without our own block is of this format
    arguments(config, tensors, shape)   head name and constructor arguments read back from such a folder
    serving(drafter, target, folder, guesses)   the command of each engine that loads the folder: see heads/serving.py
"""
