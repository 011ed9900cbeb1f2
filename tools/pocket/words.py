"""Lists written by hand for what WordNet does not say: which words matter today, and how they stand in a sentence."""


def words(text: str) -> list[str]:
    return text.split()


# WordNet has entries for letters, symbols and units that look like function words.
NOT_HEADWORDS = set(
    words("""
    the and for are was were been being has had his her him she they them this that these those with from who whom
    what which when where why how you your our its can may will shall must does did done not but nor yet out off per
    via etc fig lee les ass sex bastard screw naked
    """)
)

# Tag counts come from 1960s prose, so they miss words of today's kitchens and streets.
EVERYDAY = words("""
    ocean dog cat computer pizza bread cheese milk butter apple banana orange lemon grape strawberry potato tomato
    carrot onion garlic rice soup salad sandwich hamburger cake cookie chocolate candy sugar salt pepper coffee tea
    juice beer wine water breakfast lunch dinner kitchen oven refrigerator fork spoon knife plate cup bottle table
    chair sofa bed lamp window door roof garden bathroom shower towel soap mirror toothbrush television radio
    telephone camera clock watch keyboard printer internet software website robot laser battery engine car bicycle
    motorcycle bus truck train airplane helicopter rocket boat ship submarine bridge road airport station island
    mountain volcano river lake desert forest jungle beach valley cave rain snow ice storm thunder lightning
    hurricane tornado rainbow cloud sun moon star planet comet galaxy universe earth horse cow pig sheep goat
    chicken duck goose rabbit mouse rat lion tiger elephant giraffe zebra monkey gorilla bear wolf fox deer camel
    kangaroo penguin eagle owl parrot crow snake lizard crocodile turtle frog fish shark whale dolphin octopus crab
    spider ant bee butterfly mosquito dinosaur dragon unicorn tree flower rose grass leaf shirt dress hat shoe sock
    glove coat umbrella necklace ring doctor nurse teacher student lawyer farmer baker pilot soldier sailor artist
    poet king queen prince princess hospital school university library museum theater restaurant hotel church castle
    guitar piano violin drum trumpet football baseball basketball tennis chess poetry novel newspaper magazine
    dictionary pencil pen paper scissors hammer screwdriver wrench nail ladder money bank wallet gold silver iron
    copper diamond oxygen hydrogen carbon atom molecule electron gravity electricity magnet virus bacteria vaccine
    medicine brain heart lung liver stomach skin bone blood tooth tongue eye ear nose finger toe elbow knee love
    anger fear joy sadness dream sleep swim jump dance sing laugh cry cook drive paint climb whisper happy sad angry
    hungry thirsty tired lazy brave clever beautiful ugly delicious huge tiny purple yellow quickly slowly algebra
    geometry mathematics physics chemistry biology history philosophy democracy pocket cache algorithm calendar
    birthday holiday wedding winter summer spring autumn midnight noon hour minute century lava noodle sushi honey
    mango peach pear cherry pineapple coconut pumpkin mushroom spinach cucumber bean nut egg meat steak bacon
    sausage peanut almond walnut raisin raspberry blueberry blackberry melon watermelon plum apricot olive lettuce
    cabbage broccoli cauliflower celery radish beet pea corn wheat oat barley flour dough pasta spaghetti pancake
    waffle pie pastry biscuit cracker popcorn yogurt cream margarine mayonnaise ketchup mustard vinegar spice
    cinnamon vanilla ginger basil mint ham turkey salmon tuna lobster shrimp oyster snail worm caterpillar moth fly
    beetle grasshopper cricket wasp scorpion tick flea eel seal walrus otter beaver squirrel hamster hedgehog bat
    raccoon skunk badger moose bison buffalo donkey mule pony puppy kitten lamb calf leopard cheetah panther jaguar
    panda koala hippopotamus rhinoceros gazelle hyena chimpanzee baboon swan pigeon sparrow robin seagull ostrich
    peacock flamingo pelican vulture hawk falcon crane woodpecker hummingbird toad salamander alligator cobra python
    mammoth mammal reptile insect amphibian oak pine maple palm willow tulip daisy lily sunflower orchid cactus fern
    moss seaweed weed vine root stem branch seed blossom petal blanket pillow sheet mattress curtain carpet rug
    shelf drawer cupboard closet wardrobe desk stool bench couch bathtub sink toilet faucet bucket broom mop vacuum
    candle lantern torch match lighter basket box bag suitcase backpack purse envelope stamp postcard letter
    notebook eraser ruler glue tape stapler calculator chalk crayon brush needle thread button zipper pin rope chain
    hook wheel axe saw shovel rake bolt pliers wire pipe hose pump bell whistle toy doll puzzle balloon marble swing
    slide skateboard tractor ambulance taxi tram subway ferry canoe kayak yacht raft anchor sail parachute glider
    satellite telescope microscope thermometer barometer compass map globe flag coin jacket sweater trousers jeans
    skirt blouse suit tie belt scarf boot sandal slipper pajamas uniform apron helmet crown bracelet earring jewel
    pearl ruby emerald sapphire brick cement concrete glass plastic rubber leather cotton wool silk linen nylon
    steel aluminum lead tin zinc nickel mercury uranium helium nitrogen sulfur calcium sodium chlorine ankle wrist
    shoulder chest hip thigh thumb forehead cheek chin jaw lip throat neck kidney muscle nerve skull spine rib vein
    artery fever cough cold influenza cancer diabetes allergy asthma measles surgeon dentist pharmacist veterinarian
    engineer architect carpenter plumber electrician mechanic butcher tailor barber chef waiter cashier secretary
    librarian journalist photographer musician dancer actor actress magician detective firefighter policeman judge
    mayor senator president minister priest monk nun thief knight witch ghost vampire zombie angel demon giant dwarf
    fairy mermaid monster hero villain uncle aunt cousin nephew niece grandfather grandmother brother sister husband
    wife baby infant toddler teenager adult orphan twin widow bachelor neighbor village town city suburb capital
    continent peninsula cliff canyon glacier iceberg waterfall stream pond swamp marsh bay gulf strait reef lagoon
    oasis meadow prairie savanna tundra equator horizon sunrise sunset eclipse asteroid meteor nebula orbit
    earthquake avalanche flood drought fog mist hail frost blizzard breeze tide wave tsunami alphabet vowel
    consonant noun verb adjective adverb pronoun sentence paragraph essay fable proverb riddle rhyme metaphor legend
    myth opera ballet symphony orchestra choir flute clarinet saxophone trombone harp cello banjo accordion
    harmonica xylophone painting sculpture portrait statue mosaic cartoon comedy tragedy film photograph soccer golf
    hockey volleyball rugby boxing wrestling gymnastics swimming skiing skating surfing archery fencing marathon
    trophy medal referee goalkeeper triangle square circle rectangle cube cylinder pyramid cone polygon hexagon
    diameter radius fraction decimal percentage integer probability equation theorem microbe bacterium fungus enzyme
    protein vitamin gene chromosome evolution photosynthesis ecosystem fossil species predator prey parasite
    hibernation pollution recycling neutron proton photon isotope velocity acceleration friction momentum
    temperature thermostat transistor semiconductor laptop modem server network database compiler byte pixel
    password browser download upload program emperor pharaoh dictator republic monarchy election parliament
    constitution treaty passport visa currency tax bankruptcy mortgage salary invoice receipt insurance auction
    bargain souvenir zoo circus carnival aquarium playground stadium gymnasium cinema bakery supermarket pharmacy
    laundry garage warehouse factory mill lighthouse windmill skyscraper tower tunnel dam canal harbor pier igloo
    tent cottage palace mansion temple mosque synagogue cathedral monastery cemetery tomb kiss hug sneeze yawn snore
    blink wink giggle swallow bake boil fry grill knit sew weave borrow lend steal jealous lonely proud shy polite
    rude honest greedy generous curious nervous cheerful gentle cruel loyal stubborn silly bald fluffy sticky
    slippery transparent fragile enormous gigantic shiny rusty dusty muddy crispy spicy bitter salty pink brown gray
    turquoise violet boredom courage curiosity gratitude jealousy kindness loneliness nostalgia patience pride
""")

# The other everyday words are explained as nouns.
NOT_NOUNS_FIRST = set(
    words("""
    swim jump dance sing laugh cry cook drive paint climb whisper happy sad angry hungry thirsty tired lazy brave
    clever beautiful ugly delicious huge tiny quickly slowly kiss hug juggle sneeze yawn snore blink wink giggle
    chew swallow bake boil fry grill knit sew weave borrow lend steal jealous lonely proud shy polite rude honest
    greedy generous curious nervous cheerful gentle cruel loyal stubborn silly bald fluffy sticky slippery
    transparent fragile enormous gigantic shiny rusty dusty muddy crispy spicy sour bitter salty
    """)
)

# Where the first sense is not what is meant today, or no sense was tagged: the number of the sense, from 0.
SENSES = {
    0: """
        carrot onion hamburger scissors noodle ferry butcher iceberg oasis sunrise sunset avalanche alphabet boxing
        goalkeeper kindness emperor
    """,
    1: """
        octopus chess bank printer salt chocolate coconut battery turtle glove garlic baker mango pineapple pumpkin
        spinach cucumber almond raspberry blueberry watermelon plum apricot broccoli cauliflower celery beet pasta
        spaghetti pastry popcorn mustard vanilla lighter calculator saw puzzle helmet bracelet emerald sapphire
        nylon barber cashier fable hockey trophy decimal fossil hibernation compiler browser dictator passport
        auction gymnasium mansion turquoise
    """,
    2: """
        galaxy ring jungle wrench cache pepper peach cherry lettuce cinnamon ginger basil rake hose whistle tram
        globe nebula pyramid server canal
    """,
    3: """
        peanut olive chalk crown
    """,
    4: """
        mushroom
    """,
}
SENSE = {word: number for number, text in SENSES.items() for word in words(text)}

# Nouns with `the`.
UNIQUE = {"sun", "moon", "earth", "universe", "internet", "sky"}

# Nouns without an article, and nouns with `a` although their ending or their file in WordNet says otherwise.
MASS_WORDS = set(
    words("""
    music poetry art literature furniture money cash gold silver knowledge information news history philosophy
    chemistry algebra geometry software internet evidence advice work research education government football tennis
    chess baseball basketball traffic equipment hair grass blood paper earth clothing mail email television
    breakfast lunch dinner man help power progress behavior trade business nature space time heaven law training
    support luck noon midnight soccer golf hockey volleyball rugby archery cricket garlic broccoli cauliflower
    celery cinnamon corn wheat barley glass silk cotton wool linen steel leather cement concrete nylon
    photosynthesis fencing scissors pliers measles lettuce influenza diabetes skin hail frost fog mist popcorn
    ginger basil mustard seaweed moss chalk evolution recycling ham anatomy astronomy weather smoking love sleep fun
    homework luggage jewelry mankind humanity
    """)
)
COUNT_WORDS = set(
    words("""
    waffle pancake pie pastry biscuit plum melon radish pea peanut almond olive raspberry blueberry watermelon
    apricot beet lighter sphere fraction receipt vitamin protein enzyme isotope diameter radius semiconductor
    allergy currency village stocking bargain lobster oyster salmon salary monarchy orphan acceleration cherry
    lettuce building meeting king ring thing wing string spring evening morning painting feeling wedding drawing
    ceiling ending beginning sibling sting sling swing earring offering hearing reading opening crossing saying
    nothing apple banana orange lemon grape strawberry potato tomato carrot onion sandwich hamburger cake cookie
    pizza mango peach pear cherry pineapple coconut pumpkin mushroom cucumber bean nut egg steak sausage salad soup
    noodle candy meal dream storm hurricane tornado rainbow cloud wave flame river atom molecule disease virus color
    shape size height wall metal fuel acid gas liquid solid drug poison crisis war illness injury wound problem
    situation condition relationship mood feeling emotion wish desire quality trait ability skill virtue wind breeze
    flood shadow beam voice sound smell taste property feature community university city facility celebrity entity
    identity personality majority minority quantity opportunity difference influence audience conference sentence
    instance substance appearance alliance dance distance residence science reference experience performance kingdom
    neighborhood tide egg drink dish fluid current ray process cycle state role job degree level
    """)
)

# A gloss that starts with one of these gets no article.
DETERMINERS = set(
    words("""
    a an the any one some something someone somebody anyone anything all either each every several two three four
    five six seven eight nine ten what how that those people anybody whatever whoever your his her its their our
    everything most least whether when where
    """)
)
