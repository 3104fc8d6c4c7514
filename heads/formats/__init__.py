"""How a drafter's folder looks to others: one module per format. Saving and loading use the same module, so each states both directions.

A format module has:
    names(drafter)         our tensor name -> the format's, one to one, for every tensor that is stored
    canonical(name)        (optional) any spelling of a tensor name found in files -> the one in names()
    extras(drafter)        (optional) further tensors that engines need (maps, copies, zeros), derived from ours
    in_file(drafter, tensors), in_memory(drafter, tensors)   (optional) all tensors as folders hold them, and as the model in memory does
    config(drafter)        the keys of config.json that engines read
    read(config)           (optional) the keys of a config.json, in a form that can be compared with that of config()
    ARCHITECTURES          (optional) the engines' names of the architecture, where there are several
    beside(drafter)        (optional) further files of the folder: name -> text
    serving(drafter, target, folder, guesses)   the command of each engine that loads it, or would if trained otherwise: heads/serving.py
    unserved(drafter)      why no engine loads it: needed where serving() may return no command
    with_tokenizer         (optional) True: the target's tokenizer is saved in the folder
    names_target           (optional) True: config.json names the target's folder
and where others write such folders too:
    recognises(config)     whether a config.json without our own block is of this format; no two formats may claim the same one
    arguments(config, tensors, shape)   (head name, constructor arguments) of such a folder; raises UserError. It is also called to check
                           a folder of ours; in heads/formats/native.py, whose folders nobody else writes, it does nothing more

A drafter names its format (``Drafter.format``). For a folder that others wrote, every module here is asked; there is no other list.

``arguments`` handles every key that changes what an engine computes: it takes the value over, or refuses the folder.
"""
