"""Weights of the signs of standing instructions, in hundredths of log odds.

Made by `python -m recipes.instructions.train`, to be added to the points of the rules; a margin is
subtracted from the bias. Signs are those of `instruction_evidence`.
"""

from __future__ import annotations

from collections.abc import Mapping

BIAS = -573
_SIGNS = """
! -71 ' -7 , 13 . 27 0 -68 00 -32 000 -5 1 -17 10 -32 100 -37 11 -39 12 -8 14 -25 15 11 150 30 16 67
20 21 200 -27 22 15 24 18 3 -23 30 28 31 30 3rd -5 4 -14 40 -23 45 -87 48 -5 5 9 50 -7 6 -26 60 -16
7 -20 8 13 80 -19 9 -40 : 21 ; 197 =always 42 =answers 139 =answers-twice 83 =at-most-12 19
=at-most-18 53 =at-most-26 91 =at-most-5 -71 =at-most-8 -21 =every 45 =fragment 36 =framed 75
=imperative 76 =lasting 183 =negated 88 =once -113 =past -164 =person -37 =question -156 =role 116
=rules 97 =wish 37 =you 168 ? -156 a -103 able -54 about -23 above -30 abstract -45 accept -30
accepted 39 accepts -48 according -46 account 81 accountant 32 across -39 act 43 action 39 actual
-14 actually -59 add -11 added -8 adding -10 address -73 addressed -7 advanced -23 adventure -5
advice 61 advisor 9 after 31 afternoon 8 afterwards 36 again -44 against 33 age 17 ages -8 ago 48
agreed 77 agreement -8 ahead 7 aid -33 air -25 aisle 64 alarm 35 alcohol 87 all 12 allergic -12
allergy 12 allotment 8 allowed -16 allows -5 almost -11 alone -55 along -36 already 7 also -51
although 48 altogether 65 always -15 am 31 amazing -6 american 62 among -12 amount 80 an -77 and -16
angry 34 annual -6 another -23 answer -27 answered -30 answering -39 answers 55 any 38 anybody -40
anymore -5 anyone 57 anything 166 anyway -52 apart -5 app -27 appeal -8 appear 32 application -8
applications -15 applied -16 appointment -44 appreciate 8 approach -8 approved -24 architecture 9
are 85 area -17 aren't -17 argue 20 argument 28 arguments 9 around -85 arrive -9 arrived -48 art -8
artificial -6 as 116 ask 109 asked -36 asking -21 asks -49 asleep -23 assignment -35 assignments -25
assume 40 at 21 ate -23 attached -74 august -28 aunt -48 autumn -10 avoid 35 away -47 awful -7 b -16
b1 35 backend -6 background 18 backup -11 bad 59 bakery -77 baking 37 balcony -7 band -13 bank -26
banned 25 barely -14 based 25 basically -16 bath -7 bathroom -16 battery -17 bay -16 be 102 beach
-45 became -12 because -36 become -15 becomes -7 bed -26 bedroom -6 bedtime -15 been -73 beer -28
before 86 beforehand 50 beginning 18 begins -8 behind 15 being -31 believe 7 believed -17 belongs 14
below -17 beside 69 best -17 better 36 between 52 beyond -26 bicycle -16 big -30 bigger -38 biggest
-31 bike -5 bill 7 billing -20 binding -13 birthday -7 biscuit -9 bit -34 black -14 blank 31 blind
35 block -7 blog 41 blood -39 blue -25 board 60 boat 12 boiler -10 bold 28 bond -12 bonds -31 book
-44 books -28 boots -8 boss -46 both 16 bother -11 bottle -17 bottom 75 bought -16 box -12 boxes -10
boy 31 braces 9 brackets 94 brain -12 branch 54 brand 49 brave -6 break -12 breakfast -32 breaks 12
bridge -24 brief -33 bring 35 bringing -15 brings -62 british 49 broke -85 broken -48 brother -34
brought 10 bucket -6 budget 19 bug 18 build -21 building -68 builds -39 built -24 bullet -19 bullets
-9 bumped -6 bus -34 business -39 busy -11 but -109 butter -18 button 5 buy -6 by 17 c 10 cake -28
calculate -48 calendar -21 call 36 called -92 calling 38 calls 10 calm -8 came -15 campus -103 can
-96 can't -18 canada 49 cancer -41 cannot 27 cap 35 capital -110 capitals -10 captain 40 car -28
card -29 cards -38 care 27 career -41 carried -30 carry 12 cart -24 case 28 cases -22 cash -12 cat
-25 catch -19 ceiling 26 celsius 8 cent -7 center -9 centimetres 62 ceo -21 certain -19 chair 34
chance -15 changed -34 changes 9 changing -9 channel -40 chapter -33 characters 56 charge 9 charged
-10 charity -9 chart -7 charts 43 chat -33 chats 43 cheap 14 check 51 checked -9 checking 55 cheese
-45 chess -7 chicago 6 child -90 children 92 china -8 choir -60 choose -10 christmas -52 church -18
ci 39 circle -13 citations 137 cite 29 cities 8 city -6 claim 26 claims 63 class -54 classes -36
clean 20 clear -5 client -7 clients 100 clinic -16 clock 61 close -54 closed -15 closes 42 closing
13 clothes -12 cloud -14 club -39 cluster 47 co -22 code 32 coffee -32 cold -23 colleague 16
colleagues 15 college -46 colour 37 column -12 come 64 comes -23 coming -52 comma 130 command 39
commands -8 comment -27 comments 17 commit 84 commits 45 committee -5 common 39 companies -7 company
39 compare -5 complaining -9 complains -35 complete -20 computer 98 concert -25 conditions -60
conference -73 confidence -17 config 58 connected -8 constantly -34 contact -11 contains 38 contract
18 control -25 conventional 40 conversations 58 convert -110 cook 38 cooked 6 copy 10 corner -35
corporate 40 correct 34 cost -9 cottage -10 cough -9 council -50 country -39 county -15 couple -30
courier -5 course 16 court -11 cousin -28 cover -7 covered -13 crazy -6 create -10 creating -11
credit 41 cried -28 crisis -8 cross -29 crossword 63 crucial -7 cry -6 culture 14 cups 67 current -6
currently -5 custom 26 customer 66 customers 26 customs -47 cut -19 cutting -9 cuz 17 d -10 dad -53
dad's -30 daily 15 dairy 11 dance -8 dark 51 data -14 database 23 date 46 dates 25 daughter -41 day
-59 days 45 dead -41 deadline -12 deadlines 32 deal -7 deals 8 dear 30 decent -15 decimal 62
decision -13 decisions 15 deep 27 default 86 definitely -24 definition 7 degrees -17 delete 5
delivery 43 demo -13 dentist -5 describe 54 described 39 design -25 desk -27 development -32 did 23
didn't -31 died 9 diff -18 difference -7 differences 22 different -13 digital -18 dinner -56 direct
-5 direction -5 directly 18 director -18 disaster -27 discount 54 discuss -13 dish 39 do -35 docs 31
doctor -34 doctor's 9 doctors -51 does 5 doesn't 8 dog -17 dollar 6 dollars 62 domain -12 don't 82
done -10 dont 55 door -61 doors -22 dorm 57 double 40 down -115 dr -18 draft 76 drafts 96 drama -14
drink -17 drinks -14 drive 43 driven -6 driver -16 drives 46 driving -13 drop -20 dropped -55 drops
-36 dry 54 due -35 during -14 dynamic -16 dyslexia 36 e -9 each 55 earlier -6 early -56 earn -20
easter -16 easy -26 eat -32 eating -18 eats 37 edge -15 edit 11 effect 18 eggs -35 eight -48 either
10 electricity 13 eleven -32 else -14 email -37 emails 43 emergency 24 emojis 15 empty -32 end 42
ended -14 ends 63 energy -14 engineer 19 engineering -7 english -44 enjoy 28 entry -11 environment
16 equation -8 error -47 errors 31 essay -7 ethical 51 europe -7 euros -86 even -95 evening -13
evenings -7 event -40 events -7 ever 21 every -23 everybody -20 everyone 30 everything 28 everywhere
88 ex 50 exact 17 exactly -26 exam 7 example -43 excel -8 exceptions 103 exclamation 31 expect 38
expense -13 expenses -6 expensive -26 experiences -5 expert -40 explain 26 explanation 8
explanations 71 exports 15 extension -10 extra -27 eye -24 eyes 68 face -14 faces -11 facing 77 fact
34 fahrenheit -17 fail -26 failed -13 fair -59 family 19 far -90 fast 29 father -35 feature 67 fee
-54 feedback 100 feel -25 fees -13 feet 56 fell -8 felt -26 fetch -6 few -21 field -25 fields 30
fifteen -31 fifty 8 files 131 fill -35 filled -40 film -51 final -13 finally -43 finance -61
financial -46 fine 14 fingers -18 finish 31 finished 6 fire -27 first 94 fish 6 fit 9 fits -29
fitted -12 five -198 fix -5 fixed -15 flag 51 flat -22 flight -9 floor -17 fly -12 folks -18 follow
100 followed 45 font -24 food 104 foot 57 football -5 force 64 forget -29 forgot -29 form 31 formal
-15 formatting -19 formula -7 fortnight 7 forty -32 forward 46 found -34 four -77 fourteen 53 fourth
-38 francs 25 free 53 french -5 freshman -35 friday -25 fridays -21 fridge 18 friend -28 friendly
-34 friends -61 front 32 frozen -27 full 17 fun 5 function 16 functions 76 funeral -42 funny -44
furniture -5 game -79 games -17 gap -11 garage -18 garden 49 garlic -10 gas -14 gave -10 general 11
gentleman -10 german 39 get 58 gets 63 gift 32 girl -10 git 9 give 78 given -17 giving 22 glad 45
glass -6 global -21 gloves -5 gluten 34 go 21 goal -23 god -8 goes 18 gold -39 golden -28 golf -21
gone -16 good -73 got 10 grad -9 grade 26 grammar -6 grams -8 grandfather -19 grandma -7 grandmother
-26 grandpa -44 grandson 72 grant -10 grateful -18 great 46 greek -17 green -16 grey -16 group -37
growing -51 grown 9 guest -14 guests -12 guide -11 gym -12 habit 96 had -46 half -42 hall -33 hand 9
handle -75 hands -33 hangs -30 happened -5 happens -38 happy -45 hard -48 hardest 40 hardly -41 has
-46 hate 78 hats -14 have -43 haven't 14 having 33 hay -6 he -55 he'll -14 he's -45 heading 19
headings 43 health -12 hear -13 heard -16 hearing -35 heating -12 heavy 26 held -31 hello -8 help
-38 helpful 11 helps -33 her -80 here 73 hey 11 high -19 highest -8 hike -12 him -12 himself -37
hint 9 hints 64 hip 47 his -173 historical 61 history 54 hob 41 hobby -21 hold 22 holiday -48 home
-99 honest -24 honestly -16 honey 15 hope 25 hospital 12 hot -32 hotel -15 hour 72 hours -40 house
90 household 27 hr -33 huge -53 hungarian -20 hurt -13 husband 20 i 6 i'd 66 i'll -46 i'm 21 ice -6
idea -90 ideas 62 if 81 ignore -43 ill 18 imagine -16 impact -5 important 39 in 32 inches 29
incident 16 include -28 included 99 including 55 income -8 india 7 industry -39 information 14
ingredients 38 initials 84 ink 8 inside 37 insists -32 install 22 instead 49 insurance -23
interested -29 interesting -40 intern -10 international 31 internet 63 interns -6 into 27
introduction -51 investing -17 investment -24 investments -39 invoice -30 invoices 23 involved -23
iron -7 is 12 isn't -58 iso 81 issue 10 it 6 it'd 20 it'll -35 it's -102 italian -36 items 43 its 7
japan -16 japanese 31 jargon 70 job -23 jobs -34 joined -58 joke -27 jokes -24 journal 11 journey
-12 juggle -9 jump -23 june 9 just -68 k 17 keep 70 keeping -39 keeps -14 kept 8 kettle 55 key 50
keys -11 kick 21 kid -6 kilos -5 kind 11 kinda -12 kindly -21 kitchen -27 knees 31 know -62 known 9
knows -60 kosher 10 label 85 labs -20 lady -10 lake -22 land -75 landlord -47 language -5 languages
-41 laptop -29 large 22 largest -15 lasagne -8 last -25 late -7 lately 26 later 70 latex 38 latin 82
law 32 lawn -10 lawyer 16 lead -13 leader -12 leadership -48 leading 31 leaflets 84 learn 7 learned
-10 learning -10 lease -28 least -15 leave -5 leaves 23 leaving -17 lecture 28 led -7 left -92 legal
-8 length 5 lent -11 less 7 lesson 14 lessons -10 let -35 let's 6 lets -50 letter -102 letters 134
level 34 libraries 35 library 73 licence -30 life -25 lift -23 lifting 40 light 41 lighthouse -71
like 67 liked -20 likely 34 likes -107 limit -27 limited 17 limits 51 line 87 lines 92 link 38
linkedin -22 links 55 linter -7 lisbon -60 list -38 listening 8 lists 90 literally -6 litres 7 live
117 load -5 loan -6 local -18 locally 28 location -15 lock -51 locked -17 log -31 login -39 lol -40
london -17 long -54 longer -22 look -5 looked -64 looking -96 looks -13 loop -12 loose -7 lose -13
losing -15 lost 14 lot -27 love -92 lovely 21 loves -11 low -16 lower 11 lowercase 58 luck -21 lucky
-8 lunch -39 machine 45 machines -16 mad 53 made 37 magic -5 mail -37 mails 58 major -44 make 10
makes 30 making 28 man -56 managed 38 management -48 manager -41 managing 26 manual -13 many -60 map
-33 march -9 mark 55 market -72 marketing 32 married -18 master's -21 match 60 math 76 maths 6
matters 14 max 9 may -45 maybe -68 me 109 meal 37 meals 26 mean 59 means 124 meant -45 measured -5
meat 33 medical 43 meeting -47 meetings -22 meets -10 members -28 memo -11 memory -29 mental -12
mention 70 menu 14 merge -48 merged 9 merger 57 message -69 messages -17 met 10 metal -20 method 95
metres 51 metric 91 mg 84 middle 17 might 10 migration 39 miles -29 milk -11 mind 67 mine 32 minute
-5 minutes -39 miss -11 missed 64 missing -56 mistake 52 mistakes 11 mix 16 mixed -15 ml -41 mode
-20 modern 72 mom -21 monday 43 money -16 month -41 months -29 moon 15 more -11 morning -32 mornings
-13 mostly -8 mother -58 mountain -5 move -113 moved -13 moves 13 moving -22 mr -92 ms -7 much -69
multiple -12 mum -15 mum's -10 museum 9 music -6 must 56 my -16 myself 9 named 60 names 88 near -18
nearly -10 need 84 needn't 56 needs 75 negative 10 neighbour -36 neighbours -14 nervous -23 net 5
neutral 25 never 13 new -93 news 51 newsletter -11 newspaper 42 next -12 nice 16 night -33 nights
-11 nine 33 ninety -5 no 103 nobody -52 node -71 nodes 39 non -44 none 67 noon -6 normal 23 north 31
norway -32 not 101 notation 66 note -23 notebook -8 noted 20 notes 76 nothing 108 notice -60 noticed
-9 now -69 number 105 numbered 108 numbers 28 nurse 30 nuts -10 obviously 6 odd -39 of 10 off 36
offer 57 offered -27 offers -11 office -60 official 10 often -39 oh -23 oil 36 ok 72 okay -9 old 37
older -33 on -22 once -50 one -26 ones 96 online -20 only 59 op -11 opened -30 opening 15 opens 13
operation -7 opportunities -19 opposite 11 option 46 or 79 order 88 orders -6 other -46 other's -26
otherwise 78 ought 54 ounces 7 our 13 ours 16 out 13 outside 23 overall -8 overwhelming -12 own -38
oxford 47 p 17 pack -21 package 14 packed -10 packing -13 page 10 pages 11 paid -47 paint -19 pan 33
panels -6 paper -40 papers -30 paragraphs 77 parents -24 parish 23 park -12 parking -15 part -76
partner 35 parts 21 party 26 pass -15 passed -29 passive 13 password 52 past 62 pasta -52 paste 28
patch -5 path -6 patient 24 patients -6 patterns 11 payment -6 pays -46 pen -49 people -106 per 115
percent 21 perfect -25 permission 23 permit 16 person 54 personal -9 perspective -29 philosophy -7
phone 13 phones -10 photo 41 photos -5 physio -7 pick -23 picked 30 picks -22 picture -6 pictures 31
piece -69 pills 23 pilot 43 pizza -53 place 26 places 8 plain -17 plan 82 planning -39 plans 34
plant 29 platform -8 play 46 plays -5 please 32 plenty 68 plot 13 pls 81 plumber -11 plus -24 pm 59
pnpm 25 poem -55 poetry 26 point 21 points -24 policy 28 polish -58 polite -16 politics 68 poor -41
pork 64 port -27 portfolio -12 position 5 possible 12 post -23 poster -27 potatoes -15 pounds 7 ppl
-7 pr -32 practical -6 practice 13 prefer 14 prefers -10 prepare -44 present -51 press 29 pressure
-12 pretend -36 pretty -47 price 47 prices -16 print 53 printed 65 printer -13 printing -5 private
43 problem -8 process -43 prod 29 product 23 production 14 professional -5 program -6 programming -5
programs -12 project -51 projects -30 promised 10 proof 26 proofread -57 proper -9 properly -10
propose 86 prose 55 proud -10 public 32 pull 31 pump -9 pupils 86 purpose 45 push 61 put 67 puts -16
putting -44 python -79 quarter -19 query -13 question 108 questions 77 quick -12 quiet -10 quit 29
quite -43 quiz 61 quote 55 r 36 radio -11 rain -5 rains -11 raised -26 ramadan 21 ran -10 random 28
range -11 rate 15 rates -7 rather 134 raw 17 reach -21 read 35 reading -17 reads 78 ready -16 real
-14 really -20 reason -14 recipe 27 recipes 112 recommend 89 record -42 recovery 36 red -28 refactor
-20 refer 50 reference -50 regards 39 region 22 register 32 release -54 religion 27 remember 46
remind 12 reminder -11 rent -15 repairs -19 repeat 71 replaced 34 replies 25 reply 21 repo 42 report
19 reports 18 request 93 requests 63 require 77 required -11 requires 6 research -44 resilience -21
resource 26 respect 14 response -81 responsible -6 rest 17 restaurant -14 retired -7 returns -7
review -108 reviews -8 revolution -24 rewrite -52 rhyme -27 right 53 ring -6 rings -11 risk 34 river
-16 rn 15 robin 19 robot -18 role -24 rolls -7 roof -64 room -43 roommate -24 rooms -13 root -7
rough 47 round -27 router -10 row -14 rude -19 rule 166 rules 107 run 38 running 14 runs -16 rust 45
s 20 sad -38 safe 14 safety 5 said 56 sale -19 sales -15 salt -5 same 14 sat -24 saturdays -7 sauce
46 save -7 saved -30 saving -17 savings 14 saw -19 say 44 saying 24 says -107 scale 51 scene -11
schedule -44 schedules 65 scheduling -8 school -71 science -97 scope 77 scratch -20 screen 50 script
12 search 21 season 59 seasons 8 second 17 secret 15 secrets 32 section -17 security -12 see -39
seeing 54 seen -30 semester -36 send 86 senior -31 sense -6 sensor -24 sent -44 sentence -34
sentences 5 september 13 server -12 service 35 session -91 set -78 setting -83 settled 31 seven 39
shall 21 shape -6 share -27 shared 44 she -65 she'll -34 she's -45 shed -13 sheet -47 shelter 25
shift 17 shoes -32 shop 49 shopping -50 shorten -25 shorter -31 shot 37 should 153 shoulder 46
shouldn't 79 show 83 shower -43 shows -5 sick -30 side 53 sign 72 signature 43 signed -62 signing
-27 signs -29 silence -30 simple -72 simply -43 since 23 single 12 sister -68 sit -5 site 10 sits 18
sitting 37 six -49 sixth -5 sixty -5 size -33 sizes 54 skip 67 slack -31 sleep -62 sleeps -16 slides
9 slow -40 small 6 smaller -12 smell 7 so 186 social -38 society 26 solar -6 sold -7 solution 41
solutions 90 solve -69 some -46 somebody -29 someone -66 something -9 sometimes -44 son -12 song -12
soon -41 sore -9 sorry -5 sort 16 sound -29 sounds -8 soup -32 source 107 sources 104 space 20
spaces 88 spanish 13 spare 42 speak -50 speaking -7 speaks -22 special -42 specific -7 speech -27
spell 71 spelling 82 spend -25 spent -12 split 53 spoke -14 sports -7 spot -27 spring -36 sql 80
stack -5 stage -17 stairs -40 stand -45 standard 14 standing -21 stands 54 star -12 start 36 started
-50 startup -64 state -39 statement -6 station -30 statistics 28 status 39 stay -74 staying -41
stays 104 step 86 steps 34 stick 114 stock 23 stomach 10 stop 59 stops -12 store 19 stories 102
story 61 straight 7 strategy 13 streaming -14 street 11 strict 63 strong -21 stuck 22 student 20
students -67 study -13 studying 32 stuff 90 style 47 subject 15 subscription -20 success -41 sugar
-78 suggest -13 suggestion -16 suggestions 84 suitcase -8 sum -28 summarise -72 summarize -49
summary -60 summer -70 sums 51 sun -10 sunday -60 sundays -7 super -22 supplier 62 support -25
supposed -18 sure 69 surname 10 surprised -56 swear -39 swim 14 swimming -10 swiss 25 switched -15
system 6 table -119 tables 45 tabs 58 tag 10 take -22 taken -11 taking -11 talent -11 talk -61
talked -11 talking -44 talks -12 tastes 35 taught -10 tax 25 tea -58 teacher -10 teachers -8
teamwork -56 tech -55 technical -30 technologies -17 telephone 32 tell 115 telling 32 tells -20
temperature 39 templates 37 ten -105 tend 82 tense 48 tent -6 term -45 terms 35 test 56 tests 30
texas 15 text 32 texts 73 than 72 thank -57 thanks -10 that -25 the -110 their -105 them 71 then 45
theory -6 there -123 these -85 thesis 27 they -77 they'd -18 they'll -16 they've -51 thing 51 things
77 think -41 thinking -17 thinks -11 third 16 thirteen 5 thirty 49 this -182 those -34 though -84
thought -34 thousands 80 three -72 threw -7 through 38 throughout 20 thursday 22 thursdays -12
ticket 75 tickets -6 tight -15 til 41 time 49 times 71 tiny 35 tips -10 title 100 titles 6 to -38
toast -16 today -57 together -96 told 11 tomatoes -12 tomorrow -21 tone -10 tonight -33 too -11 took
-56 tool -17 tools 46 top 71 topic 41 topics 31 total 5 touch -36 tough -13 tour -21 town -46 trace
-17 track -28 trade -25 tradition -19 traditional 20 traffic 36 train 84 trains 32 transaction -11
transfer 39 translate 12 travel 73 treat 77 treatment 30 tree -6 tried -41 tries -5 trip -49 trips
-9 trouble 18 true -12 truly -16 trust -45 try -38 trying -28 tuesday -12 turn -118 turned -20
turning -7 turns 16 twelve -16 twenty -7 twice -38 two -20 type 46 typing 82 u 153 uk 78 uncle -30
under 58 understand -52 understood -13 unit -41 units 32 university -9 unless 144 unreal -6 until 35
up 5 update 68 updated 43 upon -34 upstairs -10 us 72 usa 18 use 86 used -8 user 125 users -11 uses
38 using -23 usually -44 valley -11 value -18 values 49 van 9 variables 83 vat 28 vegan -44
vegetarian -7 vendor 11 verse 31 version -38 very -46 vet -7 vibe 52 vicar -6 video -74 view 22
village 45 virtual -11 visit -24 visiting -7 visitors -26 voice 30 volunteers -19 vote -7 w 82 wait
30 waiting -14 walk -60 walking -9 wall 82 walls -34 want -39 wanted -64 wanting -10 wants -55 war
-16 ward 64 warehouse -11 warfarin 60 warm 39 warning 27 was -6 wasn't -9 watch -14 water -44 way 55
we 37 we'd -50 we'll -39 we're -38 we've -55 web -8 website -9 wedding -43 week -29 weekend -49
weekends 7 weekly -17 weeks 36 weight 69 weights 46 weird 8 well -55 welsh 32 went -23 wet -10 what
29 what's 27 whats -50 wheelchair 28 when 87 whenever 61 where 6 wherever 89 whether 7 which -25
while -77 white -6 who -110 who's -19 whoever -22 whom -18 why -101 wide -11 wife -14 wild -13 will
-57 willing -5 window -20 windows 37 wine 117 winter -13 wish 55 with 58 within 22 without 52 won
-22 won't -48 wonder -56 word 75 words -17 work -36 worked -7 worker -16 working -97 workout 9 works
-40 workshop -5 world -26 worried -11 worst -17 worth -29 wouldn't 39 wow -26 wrapped 23 write -27
writes -35 writing -32 wrong -120 wrote -19 yeah -31 year -17 year's -8 years -6 yes 49 yesterday
-31 yet -27 yield -5 yoga -9 york 7 you -9 you'd 100 you'll -42 you've -5 young -19 younger -8 your
70 yourself -70
"""
_PARTS = _SIGNS.split()
WEIGHTS: Mapping[str, int] = dict(zip(_PARTS[::2], map(int, _PARTS[1::2]), strict=True))
