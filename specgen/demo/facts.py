"""The names, things and facts that the corpus draws from. An entry more changes every document after it."""

# ruff: noqa: SIM905  (words in a row are read, and added to, with more ease than quoted ones)
from __future__ import annotations

NAMES = """Ada Ben Clara David Elena Felix Grace Hugo Iris Jonas Kira Liam Maya Noah Olga Priya Quinn Rosa Samir Tara
Umar Vera Wendy Xavier Yara Zane Amir Bella Chen Dario Emma Farid Gita Hana Ivan Julia""".split()
SURNAMES = """Adams Baker Castro Duval Evans Fischer Garcia Hoffman Ito Jensen Kumar Lopez Moreau Novak Okafor Petrov
Quist Rossi Santos Turner Ueda Vargas Weber Young Zhang""".split()
ITEMS = "apples books pencils marbles stickers cookies tickets stamps shells coins cards flowers oranges balloons".split()
BOXES = "bags boxes baskets packs jars".split()
TOWNS = """Ashford Brookfield Carlow Dunmore Easton Fairview Greenhill Harwick Inverell Kingsley Lakeside Milford
Northam Oakdale Penrith Redcliff Stanton Thornbury Westport Yarrow""".split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January March April June September October December".split()
PROFESSIONS = "teacher nurse engineer farmer baker driver student doctor".split()
# country, capital, continent, language, currency
COUNTRIES = [
    row.split(",")
    for row in """France,Paris,Europe,French,euro
Germany,Berlin,Europe,German,euro
Italy,Rome,Europe,Italian,euro
Spain,Madrid,Europe,Spanish,euro
Portugal,Lisbon,Europe,Portuguese,euro
Japan,Tokyo,Asia,Japanese,yen
China,Beijing,Asia,Mandarin,yuan
India,New Delhi,Asia,Hindi,rupee
Egypt,Cairo,Africa,Arabic,pound
Kenya,Nairobi,Africa,Swahili,shilling
Nigeria,Abuja,Africa,English,naira
Ghana,Accra,Africa,English,cedi
Morocco,Rabat,Africa,Arabic,dirham
Brazil,Brasilia,South America,Portuguese,real
Argentina,Buenos Aires,South America,Spanish,peso
Chile,Santiago,South America,Spanish,peso
Peru,Lima,South America,Spanish,sol
Canada,Ottawa,North America,English,dollar
Mexico,Mexico City,North America,Spanish,peso
Cuba,Havana,North America,Spanish,peso
Australia,Canberra,Oceania,English,dollar
New Zealand,Wellington,Oceania,English,dollar
Norway,Oslo,Europe,Norwegian,krone
Sweden,Stockholm,Europe,Swedish,krona
Finland,Helsinki,Europe,Finnish,euro
Denmark,Copenhagen,Europe,Danish,krone
Poland,Warsaw,Europe,Polish,zloty
Greece,Athens,Europe,Greek,euro
Turkey,Ankara,Asia,Turkish,lira
Iran,Tehran,Asia,Persian,rial
Thailand,Bangkok,Asia,Thai,baht
Vietnam,Hanoi,Asia,Vietnamese,dong
Indonesia,Jakarta,Asia,Indonesian,rupiah
South Korea,Seoul,Asia,Korean,won
Iceland,Reykjavik,Europe,Icelandic,krona
Ireland,Dublin,Europe,English,euro
Austria,Vienna,Europe,German,euro
Hungary,Budapest,Europe,Hungarian,forint
Czechia,Prague,Europe,Czech,koruna
Ukraine,Kyiv,Europe,Ukrainian,hryvnia""".splitlines()
]
# animal, group, home, food, legs
ANIMALS = [
    row.split(",")
    for row in """fox,mammal,forests,small animals and berries,four
eagle,bird,mountains,fish and small mammals,two
salmon,fish,rivers and oceans,insects and smaller fish,no
frog,amphibian,ponds,insects,four
camel,mammal,deserts,grass and shrubs,four
penguin,bird,cold coasts,fish and krill,two
spider,arachnid,gardens and houses,insects,eight
bee,insect,meadows,nectar and pollen,six
elephant,mammal,savannas,grass and leaves,four
owl,bird,woodlands,mice and insects,two
dolphin,mammal,oceans,fish and squid,no
tortoise,reptile,dry scrubland,plants and fruit,four
bat,mammal,caves,insects and fruit,two
snake,reptile,fields and forests,rodents and eggs,no
ant,insect,soil,seeds and other insects,six
horse,mammal,grasslands,grass and hay,four""".splitlines()
]
# task: its steps, one a line
HOWTOS = {
    "make a cup of tea": """Boil fresh water.
Put a tea bag in a cup.
Pour the water over the tea bag.
Wait for three minutes.
Take out the tea bag and add milk or sugar if you like.""",
    "plant a tree": """Choose a sunny place.
Dig a hole twice as wide as the roots.
Put the tree in the hole and keep it straight.
Fill the hole with soil.
Water the tree well.""",
    "write a good email": """Start with a clear subject.
Greet the reader by name.
Say what you need in the first sentence.
Keep the rest short.
Thank the reader and sign your name.""",
    "wash a car": """Park the car in the shade.
Rinse off the dust with water.
Wash it with soap from the top down.
Rinse off the soap.
Dry it with a soft cloth.""",
    "bake bread": """Mix flour, water, salt and yeast.
Knead the dough for ten minutes.
Let it rise for an hour.
Shape the dough and let it rest.
Bake it in a hot oven until it is golden.""",
    "learn a new language": """Learn a few words every day.
Listen to the language often.
Speak with other people.
Read simple books.
Do not be afraid of mistakes.""",
    "fix a flat bicycle tire": """Take the wheel off the bicycle.
Remove the tire and the inner tube.
Find the hole and patch it.
Put the tube and the tire back.
Pump up the tire and check it.""",
    "study for an exam": """Make a plan for each day.
Review your notes.
Solve old problems.
Explain the ideas to a friend.
Sleep well before the exam.""",
}
