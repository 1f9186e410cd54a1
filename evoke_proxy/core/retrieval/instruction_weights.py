"""Weights of the signs of standing instructions, in hundredths of log odds.

Made by `python -m recipes.instructions.train`, to be added to the points of the rules; a margin is
subtracted from the bias. Signs are those of `instruction_evidence`.
"""

from __future__ import annotations

from collections.abc import Mapping

BIAS = -535
_SIGNS = """
! -70 ' -8 , 14 . 29 0 -83 00 -40 1 -42 10 -41 100 -39 11 -46 14 -18 15 9 150 35 16 63 200 -26 22 15
24 8 3 -21 30 37 4 7 40 -8 45 -95 5 15 50 -8 6 -19 60 16 7 -16 8 27 9 -47 : 27 ; 183 =always 49
=answers 131 =answers-twice 78 =at-most-12 19 =at-most-18 67 =at-most-26 66 =at-most-5 -70
=at-most-8 -21 =every 33 =fragment 38 =framed 64 =imperative 75 =lasting 200 =negated 100 =once -123
=past -161 =person -39 =question -166 =role 110 =rules 98 =wish 31 =you 164 ? -154 a -108 able -65
about -29 above -33 abstract -45 accept -25 according -13 account 97 across -40 act 39 actual -16
actually -60 add -13 added -12 adding -11 address -80 addressed -9 advanced -25 adventure -5 advice
62 advisor 9 after 35 afternoon 7 afterwards 33 again -24 against 26 age 29 ago 49 agreed 76
agreement -12 ahead 5 ai -10 aid -35 air -25 alarm 25 alcohol 82 all 15 allergic -12 allergy 13
allowed -21 allows -6 almost -10 alone -59 along -44 already -5 also -63 although 50 always -15 am
26 amazing -10 american 57 among -16 amount 79 an -70 and -17 angry 35 another -39 answer -31
answered -34 answering -33 answers 40 any 49 anybody -40 anymore -7 anyone 50 anything 170 anyway
-52 app -19 appeal -9 appear 34 application -7 applications -19 applied -20 appointment -37 approach
-8 architecture 6 are 88 area -14 areas -6 aren't -17 argue 18 argument 26 arguments 9 around -85
arrive -10 arrived -45 art -8 artificial -7 as 122 ask 111 asked -27 asking -22 asks -52 asleep -23
assume 40 at 35 attached -77 august -32 aunt -44 autumn -9 avoid 32 away -42 b -16 b1 26 back 6
backend -7 background 8 backup -12 bad 63 bakery -79 baking 30 balcony -10 band -6 bank -26 banned
15 barely -13 based 23 basically -16 bath -12 bathroom -24 be 106 beach -42 became -14 because -38
become -15 bed -13 bedroom -8 bedtime -13 been -75 beer -33 before 99 beginning 17 begins -10 behind
31 being -38 believe 5 believed -18 belongs 12 below -13 beside 61 best -23 better 37 between 45
beyond -28 bicycle -16 big -24 bigger -12 biggest -36 bike -5 bill 23 birthday -5 biscuit -16 bit
-37 black -15 blank 26 blind 28 blog 38 blood -42 blue -28 board 61 boat 5 boiler -5 bold 30 bond
-13 bonds -35 book -20 books -20 boots -8 boss -45 both 8 bother -15 bottom 80 bought -13 boxes -12
boy 35 brackets 97 brain -14 branch 68 brand 44 breakfast -36 breaks 9 bridge -25 brief -32 bring 43
bringing -18 british 51 broke -88 broken -49 brother -34 brought 5 budget 22 build -23 building -75
builds -42 built -20 bullet -19 bullets -11 bus -38 business -38 busy -16 but -105 butter 6 buy -8
by 19 cake -31 calculate -52 calendar -21 call 42 called -80 calling 32 calls 40 calm -9 came -12
can -93 can't -28 cancer -49 cannot 26 cap 33 capital -114 capitals -6 captain 40 car -30 card -28
cards -44 care 30 carried -31 carry 10 case 56 cases -19 cash -20 cat -26 catch -22 ceiling 23
center -9 centimetres 58 ceo -24 certain -21 chair 32 chance -17 change 6 changed -41 changes 9
chapter -33 characters 53 charge 10 charged -13 charity -7 charts 34 chat -42 chats 39 cheap 10
check 46 checking 48 chess -29 chicago 12 child -88 children 91 choir -61 choose -10 christmas -52
church -20 ci 31 circle -18 citations 130 cite 26 city -5 claim 29 claims 58 class -57 classes -34
clean 20 client -9 clients 96 clock 58 close -61 closed -18 closes 36 closing 8 clothes -10 cloud
-16 club -40 cluster 48 co -15 coach -5 code 24 coffee -37 cold -22 colleague 12 colleagues 12
college -52 colour 41 column -15 come 68 comes -28 coming -50 comma 126 command 30 commands -8
comment -32 comments 22 commit 72 commits 49 committee 5 common 42 companies -7 company 40 compare
-7 compared -5 complaining -9 complains -36 complete -18 computer 90 concert -30 conditions -58
conference -74 confidence -19 config 56 constantly -37 contact -11 contains 32 contract 13 control
-18 conversations 60 convert -115 cook 34 corner -38 corporate 42 correct 35 cost -27 costs -5
cottage -13 could 6 council -51 count -9 country -40 couple -30 course 18 court -16 cousin -28 cover
-9 crazy -6 create -12 creating -11 credit 39 cried -6 crisis -11 cross -30 crucial -9 culture 6
cups 65 current -9 currently -5 custom 26 customer 63 customers 26 customs -50 cutting -8 cuz 13 d
-28 dad -51 dad's -17 daily 17 dairy 12 dark 57 data -13 database 19 date 51 dates 20 daughter -36
day -61 days 48 dead -42 deadline -7 deadlines 26 deal -15 dear 26 decent -18 decided -12 decimal 54
decision -14 decisions 10 deep 31 default 78 delete 8 delivery 46 dentist -5 describe 72 described
32 design -20 desk -28 development -33 did 26 didn't -24 died 7 diff -19 difference -9 differences
25 different -20 dinner -55 direction -5 directly 15 disaster -17 discount 47 discuss -12 dish 34 do
-20 docs 35 doctor -31 doctor's 11 doctors -51 does 22 doesn't 30 dog -19 dogs -5 doing 18 dollar 9
dollars 58 domain -14 don't 87 done -7 dont 56 door -43 doors -23 dorm 57 double 43 down -116 draft
64 drafts 94 drink -20 drinks -18 drive 42 driven -7 driver -7 drives 41 driving -12 drop -25
dropped -58 drops -37 dry 64 due -28 during -17 dutch -18 dynamic -17 dyslexia 36 e -16 each 37
early -54 earn -20 easy -27 eat -26 eating -15 eats 32 edge -20 edit 8 effect 15 eggs -36 eight -33
electricity 7 eleven -34 else -9 email -38 emails 36 emergency 20 emojis 9 empty -34 end 43 ended
-16 ending -6 ends 60 energy -12 engineer 23 engineering -7 english -49 enjoy 33 enough 12 entry -11
environment 7 equation -10 error -41 errors 25 essay -10 ethical 48 europe -10 euros -93 even -97
evening -38 evenings -7 event -14 events -12 ever 21 every -35 everybody -25 everyone 25 everything
19 everywhere 80 ex 51 exactly -27 exam 16 example -45 examples -7 excel -13 exceptions 94
exclamation 24 expect 51 expense -14 expenses -7 experiences -8 expert -39 explain 21 explanation 7
explanations 72 exports 11 extension -8 extra -31 eye -22 eyes 45 face -13 faces -14 fact 39
fahrenheit -19 fail -25 failed -12 fair -53 fall -5 family 7 far -105 fast 25 father -35 feature 58
fee -56 feedback 95 feel -23 feet 64 fell -11 felt -31 fetch -10 few -20 field -10 fields 50 fifteen
-35 figure -7 figures 46 files 116 fill -5 filled -44 film -53 finally -45 finance -66 financial -52
find 7 fine 7 finish 29 finished 9 fire -30 firm -5 first 99 fish -12 fit 6 five -195 fix -7 fixed
-19 flag 51 flat -28 flight -13 floor -18 fly -13 folks -22 follow 88 food 103 for -5 force 57
forget -23 forgot -31 form 43 format -7 formatting -20 formula -5 forty -6 forward 36 found -34 four
-60 fourteen 40 fourth -41 francs 22 free 48 french -5 freshman -36 friday -33 fridays -35 friend
-38 friendly -38 friends -62 from 8 front 46 full 12 fun 10 function 11 functions 66 funny -43
further -9 future -5 game -81 games -18 gap -9 garage -17 garden 44 garlic -9 general 9 german 21
get 51 gets 67 getting -9 gift 33 git 8 give 77 given -19 giving 21 glasses -8 global -22 gluten 26
go 11 goal -12 goes 31 going 18 golden -30 golf -22 gone -13 good -74 got 7 grad -11 grade 31 grams
-12 grandma -8 grandmother -29 grandpa -47 grandson 75 grateful -22 great 42 greek -14 green -14
group -45 growing -55 grown 10 guess 7 guest -16 guests -13 guide -12 gym -12 habit 101 had -41 half
-39 hall -42 hand 10 handle -86 hands -25 hanging -5 hangs -36 happened -9 happens -40 happy -46
hard -20 hardest 39 hardly -44 has -28 hate 78 have -41 haven't 14 having 32 he -59 he's -29 head 7
heading 18 headings 40 hear -27 heard -8 hearing -34 heart -6 heating -10 heavy 24 held -26 hello
-10 help -41 helpful 10 helps -44 her -64 here 60 hey 17 high -24 highest -9 hike -15 him -16
himself -36 hint 11 hints 65 hip 46 his -115 historical 59 history 67 hit -6 hobby -20 hold 21
holiday -50 home -108 honest -25 honestly -16 hope 22 hot -34 hotel -18 hour 60 hours -38 house 82
huge -51 hungarian -19 hurt -18 husband 17 i -6 i'd 83 i'll -55 i'm 9 i've 9 idea -92 ideas 50 if 74
ignore -43 ill 17 image 9 imagine -19 impact -6 important 33 in 30 inches 28 include -28 included
113 including 52 income -8 india 9 industry -41 information 10 initials 78 insists -35 install 26
instead 52 insurance -21 interest -9 interested -32 interesting -39 intern -13 international 26
internet 64 interview -17 into 25 intro -5 introduction -52 invest -5 investing -23 investment -26
investments -40 invoices 20 involved -28 iron -11 is 10 isn't -51 iso 73 issue 10 it 6 it'd 20 it'll
-33 it's -100 italian -37 item -5 japan -17 japanese 43 jargon 70 job -32 jobs -38 joined -15 joke
-32 jokes -27 journal 14 journey -14 juggle -11 jump -21 june -17 just -74 keep 67 keeping -45 keeps
-23 kept 5 kettle 57 key 44 keys -18 kid -6 kids -7 kind 15 kinda -12 kindly -23 kit 7 kitchen -34
knees 36 know -54 known 14 knows -31 kosher 10 lab -5 label 72 lady -10 lake -28 land -80 landlord
-40 language -10 languages -49 laptop -23 laptops -8 large 32 largest -16 last -33 late -14 lately
27 later 64 latex 36 latin 79 law 29 lawn -14 lawyer 16 lead -13 leader -13 leading 28 learned -30
learning -12 lease -22 least -22 leave -9 leaves 18 leaving -12 lecture 26 led -6 left -71 legal 5
length 5 lent -11 lesson 13 let -37 let's -7 lets -56 letter -99 letters 127 level 46 libraries 31
library 90 licence -34 life -39 lift -23 lifting 32 light 39 lighthouse -68 like 74 liked -22 likes
-22 limited 19 limits 34 line 70 lines 81 link 39 linkedin -23 links 49 linter -21 lisbon -63 list
-39 lists 103 literally -9 live 124 living -5 load -6 local -22 locally 25 location -14 lock -50
locked -15 log -36 login -48 lol -38 long -56 longer -24 look 12 looked -74 looking -93 looks -12
lose -17 losing -16 lost 36 lot -27 love -101 lovely 19 loves -13 low -8 lower 6 lowercase 57 luck
-25 lucky -8 lunch -43 machine 40 machines -16 mad 56 made 44 magic -6 mail -31 mails 44 major -48
make 11 makes 30 making 22 man -58 managed 29 manager -41 managing 25 many -62 march -13 mark 54
market -75 marketing 32 marks 19 married -18 master's -22 match 51 math 71 matter 8 may -52 maybe
-72 me 99 meal 32 meals 18 mean 57 means 144 meant -32 meat 30 medical 41 meeting -49 meetings -23
meets -10 members -28 memo -14 memory -34 mental -12 mention 66 menu 10 merge -49 merger 51 message
-71 messages -17 met 16 method 96 metres 43 metric 98 mg 72 middle 20 midnight -7 migration 40 mind
63 mine 23 minute 9 minutes -40 missed 62 missing -55 mistake 57 mistakes 10 mix 17 mixed -15 mode
-26 modern 69 mom -20 monday 39 money -23 month -46 months -30 more -13 morning -36 mornings -13
most -11 mostly -10 mother -63 move -112 moved -14 moving -24 mr -12 ms -9 much -70 multiple -11 mum
-13 mum's -10 museum 5 music -8 must 48 my -26 name 22 named 56 names 74 near -11 nearly -10 need 86
needed 9 needn't 59 needs 81 negative 8 neighbour -33 neighbours -15 nervous -21 net 8 network -5
neutral 24 new -100 news 45 newsletter -9 newspaper 43 next -25 nice 11 night -36 nights -8 nine 55
ninety -5 no 89 nobody -59 nodes 40 non -47 none 60 normal 20 north 11 norway -32 not 98 notation 42
note -26 notebook -7 noted 13 notes 71 nothing 106 notice -73 now -72 number 89 numbers 36 nurse 36
nuts -17 odd -40 of 5 off 54 offer 45 offered -22 offers -8 office -47 official 11 often -32 oh -25
oil 30 ok 69 okay -10 old 38 on -23 once -53 one -27 ones 99 online -17 only 54 op -12 open -8
opened -32 opening 12 opens 13 opportunities -23 opposite 7 option 42 or 80 order 96 orders -14
other -28 other's -25 otherwise 81 ought 54 ounces 8 our 16 ours 15 ourselves -5 out 10 outside 24
over -5 overall -9 overwhelming -14 own -13 oxford 43 p 14 pack -27 package 5 packed -9 packing -7
page 11 pages 12 paid -52 paint -23 pan 26 paper -26 papers -39 paragraphs 82 parents -27 parish 25
park -17 parking -21 part -77 partner 28 parts 25 party 26 pass -18 passive 14 password 53 past 54
paste 23 patch -16 path -5 patient 22 patterns 16 pay -10 payment -7 pays -33 people -110 per 129
percent 50 perfect -27 permit 14 person 49 personal -19 perspective -30 philosophy -8 phone 11
phones -11 photo 46 pick -29 picked 25 picture -6 pictures 31 piece -65 pizza -52 place 36 plain 7
plan 72 planning -36 plans 26 plant 23 platform -9 play 42 plays -6 please 31 plenty 71 plot 12 pls
70 plumber -12 plus -25 pnpm 25 poem -50 point 19 points -26 policy 37 polish -58 polite -20
politics 69 poor -46 pork 59 port -21 portfolio -12 position 5 possible 16 post -21 poster -30
potatoes -18 pounds 35 ppl -9 pr -36 practice 43 prefer 9 prefers -12 prepare -47 present -56 press
35 pressure -16 pretend -30 pretty -53 price 69 prices -20 print 56 printed 66 printer -19 printing
-5 private 41 problem -8 process -46 product 19 production 20 professor -9 program -7 programming -6
programs -14 project -44 projects -31 promised 10 proof 36 proofread -58 propose 88 prose 54 proud
-12 public 25 pull 30 purpose 42 push 58 put 82 puts -19 python -83 quarter -19 query -13 question
108 questions 77 quick -12 quiet -10 quit 29 quite -39 quiz 61 quote 66 r 36 radio -13 rains -14
raised -17 ramadan 20 ran -11 random 27 range -18 rate 18 rates -9 rather 125 raw 15 reach -29 read
34 reading -14 reads 68 ready -12 real -17 really -13 reason -16 recently -5 recipe 24 recipes 104
recommend 89 record -46 recovery 44 red -30 refactor -24 refer 45 reference -49 regards 34 release
-48 religion 25 remember 45 remind 15 reminder -14 rent -15 repeat 74 replies 27 reply 19 repo 40
report 14 reports 33 request 101 requests 58 require 77 required -10 requires 6 research -49 respect
12 response -58 responsible -7 rest 14 restaurant -14 returns -10 review -110 revolution -24 rewrite
-57 rhyme -23 right 43 risk 29 river -14 rn 12 role -24 roof -75 room -49 roommate -21 rooms -17
root -8 rough 37 round -15 router -14 row -16 rude -17 rule 156 rules 81 run 16 running 21 runs -12
rust 44 s 18 safe 22 said 47 sale -21 sales -18 same 22 sat -10 saturdays -12 sauce 39 save -8 saved
-33 savings 15 saw -25 say 36 saying 22 says -97 scale 44 schedule -46 schedules 64 scheduling -9
school -64 science -107 scratch -19 screen 46 script 10 search 19 season 54 second 15 secret 17
secrets 30 section -16 security -16 see -42 seeing 50 seems -5 seen -35 semester -37 send 79 senior
-31 sense -9 sent -13 sentence -33 server -17 service 39 session -99 set -81 sets -6 setting -75
settled 27 seven 31 shall 22 shape -8 share -28 shared 37 she -52 she'll -29 she's -37 shed -13
sheet -33 shelter 32 shift 13 shoes -21 shop 50 shopping -47 shorten -26 shorter -32 shot 36 should
154 shoulder 44 shouldn't 75 show 78 shower -40 shown -18 shows -5 sick -29 side 58 sign 63
signature 41 signed -67 signing -25 signs -33 similar -5 simple -80 since 28 sing -5 single 9 sister
-68 sit -6 sits 17 sitting 32 six -50 size -30 sizes 53 skip 63 slack -31 sleep -55 sleeps -21
slides 10 slow 12 smaller -11 so 189 social -41 society 28 sold -7 solutions 88 solve -67 some -55
somebody -29 someone -71 sometimes -55 somewhere -5 son -15 song -16 soon -27 sorry -7 sort 17 sound
-23 sounds -12 soup -31 source 103 sources 99 space 13 spaces 75 spanish 5 spare 61 speak -29
speaking -6 speaks -25 special -47 specific -8 speech -24 spell 68 spelling 80 spend -28 spent -13
split 51 spoke -15 sports -13 spot -14 spring -39 sql 79 stack -6 stage -18 stairs -47 stand -39
standard 15 standing -23 stands 55 star -18 start 27 started -55 starting -6 starts -7 startup -78
state -49 statement -7 station -13 statistics 32 status 36 stay -85 staying -41 stays 101 step 85
steps 29 stick 107 still 9 stock 13 stomach 6 stop 53 storage -5 store 15 stories 94 story 60
straight 11 strategy 6 streaming -12 street 13 strict 62 strong -13 stuck -14 student 16 students
-70 studies -5 study -15 studying 33 stuff 78 style 43 subject 13 subscription -23 success -43 sugar
-71 suggest -27 suggestion -21 suggestions 78 sum -26 summarise -72 summarize -49 summary -71 summer
-68 sunday -57 sundays -8 super -27 supplier 54 support -15 supposed -16 sure 65 surname 9 surprised
-59 swear -36 swim 15 swimming -9 swiss 22 system 5 table -127 tables 42 tabs 47 tag 10 take -22
taking -12 talent -12 talk -63 talking -37 tastes 37 taught -9 tax 21 tea -59 teacher -20 teachers
-9 team -5 teams -5 teamwork -55 tech -55 technical -31 technologies -19 telephone 33 tell 113
telling 30 tells -22 temperature 31 ten -113 tend 82 tense 45 tent -8 term -38 terms 33 test 53
tests 29 texas 14 text 39 texts 66 than 74 thank -62 thanks -12 that -26 the -111 their -111 them 76
then 37 there -97 these -91 thesis 31 they -67 they'd -20 they'll -17 they're 11 they've -46 thing
53 things 74 think -38 thinking -19 thinks -11 third 15 thirty 45 this -193 those -35 though -89
thought -39 thousands 74 three -66 threw -10 through 44 throughout 25 thursday 20 ticket 71 tickets
-5 tight -8 til 42 till 9 time 57 times 55 tiny 38 title 102 to -43 toast -8 today -51 together -99
told 5 tomatoes -14 tomorrow -20 tone -15 tonight -24 too -12 took -48 tool -19 tools 39 top 65
topic 43 topics 28 total 6 touch -20 tour -25 town -52 trace -18 track -32 trade -27 tradition -18
traditional 21 traffic 31 train 85 trains 37 transaction -9 transfer 37 translate 22 travel 67 treat
73 tree -9 tried -21 tries -6 trip -52 trips -11 true -12 trust -50 try -41 trying -30 tuesday -13
turn -120 turned -30 turning -9 turns 12 twelve -18 twenty -5 twice -37 two -9 type 44 typing 81 u
144 uncle -35 under 73 understand -59 understood -15 unit -38 units 18 university -10 unless 144
until 38 update 66 updated 42 upon -34 us 90 usa 16 use 87 used -5 user 132 users -6 uses 31 using
-14 usually -48 value -23 values 43 van 16 variables 83 vat 22 vegan -47 vegetarian -7 vendor 23
verse 5 version -37 very -67 vet -5 vibe 43 vicar -9 video -66 view 19 village 30 virtual -7 visit
-29 voice 17 vote -11 w 77 wait 34 waiting -14 walk -61 walking -10 wall 83 walls -41 want -34
wanted -65 wanting -13 wants -51 war -22 ward 66 warehouse -13 warm 39 warning 27 was -13 wasn't -8
watch -15 water -37 way 60 we 38 we'd -63 we'll -43 we're -36 we've -52 web -9 wedding -47 week -26
weekend -54 weekly -19 weeks 31 weight 64 weird 5 well -57 welsh 33 went -26 what 23 what's 38
whatever -7 wheelchair 22 when 84 whenever 66 where -16 wherever 94 whether 8 which -27 while -78
white -13 who -101 who's -18 whoever -20 whom -19 why -85 wide -15 wife -19 wild -26 will -54 window
-23 windows 34 wine 111 winter -11 wish 60 with 71 within 19 without 38 woman -5 won -19 won't -61
word 75 words -20 work -36 working -99 works -45 world -25 worried -9 worst -20 worth -28 wouldn't
41 wow -32 wrapped 21 write -25 writes -36 writing -34 wrong -130 wrote -22 yeah -34 year -16 year's
-10 years -7 yes 43 yesterday -35 yet -28 york 9 you -11 you'd 88 you'll -43 you're -6 you've -11
young -19 younger -8 your 66 yourself -70
"""
_PARTS = _SIGNS.split()
WEIGHTS: Mapping[str, int] = dict(zip(_PARTS[::2], map(int, _PARTS[1::2]), strict=True))
