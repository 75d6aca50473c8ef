"""Where one chunk of a waiting request's prefix lies: a device by its number from 0 on, or one of these."""

#: In staging, on all ranks.
RESIDENT_PLACE = -1
#: Being stored by this engine: it can be loaded before long.
STORING_PLACE = -2
