"""The words and facts in the generated documents. Any change to them changes all documents, and the checksums in the tests."""

# ruff: noqa: SIM905 (a string of words is easier to read and to extend than a list of quoted words)
from __future__ import annotations

NAMES = """Ada Adam Alba Alice Amir Anna Anton Arun Bella Ben Boris Bruno Carla Carmen Cem Chen Clara Cora Dana Daniel
Dario David Diego Dora Edith Elena Eli Emil Emma Erik Esther Eva Farid Felix Fiona Frank Freya Gita Gloria Grace Greta
Hana Harold Hassan Helen Henry Hugo Ida Igor Ines Iris Isaac Ivan Jack Jane Jonas Jorge Julia Karim Karl Kate Kenji Kira
Lars Laura Leo Leon Liam Lina Lucas Lucy Luis Lydia Maria Marta Maya Mila Mina Nadia Nina Noah Olaf Olga Omar Oscar Paul
Paula Pedro Petra Priya Quinn Rita Robert Rosa Ruth Samir Sara Sofia Stella Tara Theo Thomas Tina Umar Vera Victor Wendy
Xavier Yara Yusuf Zane Zoe""".split()
SURNAMES = """Abbott Adams Akin Allen Baker Banks Barnes Becker Bell Berg Blake Boyd Brandt Burns Carter Castro Chan Clark
Cole Cruz Dahl Diaz Dixon Dubois Duval Ellis Evans Falk Fischer Flores Ford Fox Garcia Gibson Grant Green Gupta Haas Hale
Hansen Hart Hoffman Holm Hughes Ito Jensen Jones Kato Keller Khan Klein Kumar Lang Larsen Lee Lima Lind Lopez Marsh
Martin Meyer Miller Moore Moreau Nash Nolan Novak Okafor Olsen Ortiz Owen Park Patel Perez Petrov Porter Quist Reed
Reyes Rossi Roth Russo Santos Sato Schmidt Shaw Silva Singh Stone Tan Torres Turner Ueda Vargas Vogel Wagner Walsh
Weber West Wolf Wong Young Zhang""".split()
ITEMS = """apples books pencils marbles stickers cookies tickets stamps shells coins cards flowers oranges balloons
pens plates cups candles bottles ribbons buttons beads lemons pears peaches tomatoes eggs nuts bricks tiles lamps chairs
toys kites bulbs seeds masks maps keys spoons""".split()
BOXES = "bags boxes baskets packs jars crates trays bundles".split()
TOWN_BEGINNINGS = """Ash Birch Black Brook Car Clay Cold Deer Dun East Elm Fair Fern Green Har Hazel High King Lake Lin Long
Mill Moss New North Oak Pen Pine Raven Red Rock Rose Sand Silver Stan Stone Thorn West Wind Wood""".split()
TOWN_ENDINGS = "field ford ham hill low more side ton town view well wick".split()
TOWNS = [beginning + ending for beginning in TOWN_BEGINNINGS for ending in TOWN_ENDINGS]
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
PROFESSIONS = """teacher nurse engineer farmer baker driver student doctor painter lawyer carpenter gardener plumber
singer pilot chef librarian""".split()
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
# task: its steps, one per line
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
