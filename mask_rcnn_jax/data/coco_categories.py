"""COCO 2017 categories, for weights without their annotations."""

_NAMES = """
person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant,
stop sign, parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe,
backpack, umbrella, handbag, tie, suitcase, frisbee, skis, snowboard, sports ball, kite, baseball
bat, baseball glove, skateboard, surfboard, tennis racket, bottle, wine glass, cup, fork, knife,
spoon, bowl, banana, apple, sandwich, orange, broccoli, carrot, hot dog, pizza, donut, cake, chair,
couch, potted plant, bed, dining table, toilet, tv, laptop, mouse, remote, keyboard, cell phone,
microwave, oven, toaster, sink, refrigerator, book, clock, vase, scissors, teddy bear, hair drier,
toothbrush
"""
_UNUSED = (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)
_IDS = (category_id for category_id in range(1, 91) if category_id not in _UNUSED)
# (id, name) as in instances_{train,val}2017.json.
COCO_CATEGORIES: tuple[tuple[int, str], ...] = tuple(
    zip(_IDS, " ".join(_NAMES.split()).split(", "), strict=True)
)
