"""Weights of the signs of standing instructions, in hundredths of log odds.

Made by `python -m recipes.instructions.train`, to be added to the points of the rules; a margin is
subtracted from the bias. Signs are those of `instruction_evidence`.
"""

from __future__ import annotations

from collections.abc import Mapping

BIAS = -498
_SIGNS = """
! -67 , 11 . 35 0 -84 00 -31 1 -42 10 -38 100 -39 11 -48 12 6 14 -18 15 10 150 34 16 64 200 -24 22
16 24 25 3 -17 30 37 4 5 40 -9 45 -95 5 17 50 -9 6 -21 60 13 8 19 9 -49 : 33 ; 184 =always 51
=answers 126 =answers-twice 77 =at-most-12 19 =at-most-18 64 =at-most-26 31 =at-most-5 -72
=at-most-8 -20 =every 31 =fragment 39 =framed 59 =imperative 73 =lasting 195 =negated 99 =once -122
=past -163 =person -38 =question -171 =role 114 =rules 100 =wish 31 =you 172 ? -149 a -110 able -62
about -34 above -29 abstract -44 accept -27 according -14 account 91 across -29 act 39 actually -58
add -12 added -13 adding -9 address -81 addressed -10 advanced -20 advice 53 advisor 9 after 39
afternoon 10 afterwards 29 again -30 against 24 age 27 ago 51 agreed 78 agreement -13 ai -9 aid -34
air -26 alarm 21 alcohol 81 all 17 allergic -14 allergy 9 allowed -22 allows -5 almost -7 alone -58
along -41 already -8 also -56 although 47 always -16 am 26 american 64 among -17 amount 78 an -73
and -15 angry 36 another -42 answer -31 answered -33 answering -22 answers 32 any 43 anybody -39
anymore -7 anyone 59 anything 166 anyway -50 anywhere 5 app -19 appeal -9 appear 33 application -8
applications -14 applied -24 appointment -39 appreciate -6 approach -11 architecture 7 are 88 area
-14 areas -7 aren't -19 argue 19 argument 27 arguments 11 around -88 arrive -11 arrived -44 art -8
artificial -7 as 118 aside -9 ask 112 asked -29 asking -25 asks -64 asleep -16 assistant -6 assume
41 at 32 attached -76 august -31 aunt -44 autumn -10 avoid 27 away -34 b -11 b1 28 back 8 backend -7
background 6 backup -12 bad 56 bakery -77 baking 34 balcony -9 bank -25 banned 10 barely -16 based
23 basically -21 bath -12 bathroom -25 be 118 beach -39 became -13 because -36 become -16 bed -12
bedroom -6 bedtime -10 been -79 beer -30 before 95 beginning 14 begins -11 behind 43 being -28
believed -19 belongs 12 below -11 beside 57 best -26 better 47 between 49 beyond -17 bicycle -17 big
-18 bigger -15 biggest -33 bike -7 bill 21 birthday -11 biscuit -14 bit -33 black -20 blank 25 blind
26 blog 37 blood -44 blue -26 board 59 boat 9 boiler -5 bold 32 bond -10 bonds -34 book -18 books
-16 boots -8 boss -50 both 9 bother -20 bottom 76 bought -11 boxes -11 boy 33 brackets 97 brain -19
branch 69 brand 42 break 5 breakfast -33 breaks 7 bridge -23 brief -30 bring 41 bringing -22 british
55 broke -86 broken -50 brother -37 brought 7 budget 23 build -18 building -77 builds -43 built -19
bullet -21 bullets -10 bus -39 business -45 busy -11 but -97 butter 5 buy -8 by 21 cake -29
calculate -52 calendar -13 call 48 called -81 calling 34 calls 39 calm -9 came -11 can -97 can't 13
cancer -51 cannot 27 cap 34 capital -110 capitals -7 captain 39 car -31 card -26 cards -44 care 24
carried -31 carry 11 case 59 cases -21 cash -23 cat -26 catch -8 ceiling 24 center -13 centimetres
54 ceo -22 certain -25 chair 30 chance -12 change 9 changed -44 changes 11 chapter -33 characters 53
charge 8 charged -13 charity -8 charts 35 chat -40 chats 39 cheap 11 check 48 checking 48 chess -35
chicago 12 child -85 children 93 china -6 choir -59 choose -9 christmas -60 church -19 ci 29 circle
-19 citations 128 cite 28 claim 28 claims 60 class -45 classes -31 clean 20 client -8 clients 100
clock 55 close -61 closed -14 closes 34 closing 7 clothes -11 cloud -15 club -34 cluster 48 co -18
coach -7 code 31 coffee -35 cold -24 colleague 8 colleagues 10 college -46 colour 38 column -15 come
67 comes -27 coming -47 comma 127 command 31 commands -10 comment -32 comments 19 commit 72 commits
45 common 44 companies -5 company 33 compare -7 compared -7 complaining -12 complains -35 complete
-18 computer 83 concert -31 conditions -56 conference -73 confidence -22 config 56 constantly -38
contact -12 contains 30 contract 14 control -21 conversations 61 convert -112 cook 33 corner -37
corporate 41 correct 37 cost -29 cottage -16 could 8 council -46 count -9 country -44 couple -29
course 22 court -15 cousin -27 cover -8 crazy -5 create -14 creating -15 credit 38 cried -6 crisis
-12 cross -33 crucial -10 culture 16 cups 63 current -9 currently -6 custom 18 customer 60 customers
26 customs -52 cutting -7 cuz 14 d -112 dad -40 dad's -18 daily 12 dairy 11 dark 54 dashboard -5
data 5 database 15 date 54 dates 18 daughter -34 day -59 days 47 dead -41 deadline 5 deadlines 24
deal -20 deals 5 dear 22 decent -16 decided -11 decimal 54 decision -16 decisions 10 deep 31 default
81 delete 6 delivery 49 dentist -6 describe 66 described 30 design -19 desk -37 development -33 did
26 didn't -25 died 9 diff -19 difference -9 differences 27 different -22 dinner -55 direction -5
directly 17 disaster -20 discount 46 discuss -10 dish 34 do -12 docs 34 doctor -29 doctor's 9
doctors -46 does 16 doesn't 40 dog -19 dogs -5 doing 21 dollar 16 dollars 54 domain -15 don -29
don't 114 done -7 dont 58 door -44 doors -22 dorm 57 double 42 down -121 draft 66 drafts 91 drink
-23 drinks -17 drive 41 driven -6 driver -7 drives 41 driving -13 drop -21 dropped -58 drops -36 dry
64 due -28 during -18 dutch -19 dynamic -20 dyslexia 35 e -9 each 39 earlier -5 early -57 earn -20
easy -26 eat -34 eating -21 eats 32 edge -22 edit 8 effect 14 eggs -36 eight -33 electricity 5
eleven -37 email -38 emails 56 emergency 23 emojis 9 empty -31 end 40 ended -16 ending -6 ends 57
energy -13 engineer 16 engineering -6 english -47 enjoy 45 enough 26 entry -10 environment 5
equation -8 error -41 errors 21 essay -13 ethical 66 europe -9 euros -92 even -82 evening -38
evenings -5 event -13 events -13 ever 23 every -35 everybody -26 everyone 23 everything 15
everywhere 82 ex 50 exactly -14 exam 21 example -45 examples -6 excel -14 exceptions 91 exclamation
23 expect 51 expense -13 expenses -7 experiment -5 expert -37 explain 19 explanations 63 exports 12
extension -7 extra -30 eye -21 eyes 47 face -17 faces -12 fact 47 fahrenheit -19 fail -27 failed -13
fair -52 family 7 far -108 fast 24 father -41 feature 55 fee -57 feedback 82 feel -21 feet 50 fell
-11 felt -18 fetch -10 few -12 field -10 fields 48 fifteen -36 fifty 5 figure -10 figures 49 file -7
files 114 filled -45 film -57 finally -43 finance -65 financial -50 fine 8 finish 32 finished 6 fire
-29 firm -6 first 97 fish -10 fit 7 five -203 fix -11 fixed -20 flag 47 flat -31 flight -13 floor
-17 fly -13 folks -22 follow 90 food 104 for -5 force 57 forget -27 forgot -30 form 39 format -7
formatting -22 formula -5 forty -8 forward 39 found -34 four -62 fourteen 39 fourth -38 francs 22
free 43 french -6 freshman -35 friday -34 fridays -29 friend -35 friendly -42 friends -57 from 8
front 48 full 10 fun 8 function 7 functions 66 funny -41 further -7 game -64 games -19 gap -8 garage
-19 garden 43 garlic -11 german 21 get 62 gets 65 getting -9 gift 30 git 8 give 75 given -21 giving
18 glasses -7 global -20 gluten 21 go 20 goal -14 god -5 goes 32 going 14 golden -30 golf -22 gone
-10 good -85 got 5 grad -12 grade 32 grams -12 grandma -9 grandmother -29 grandpa -47 grandson 73
grateful -18 great 40 greek -18 green -17 group -33 growing -57 grown 8 guess 20 guest -19 guests
-14 guide -14 gym -10 habit 99 had -42 half -36 hall -40 hand 12 handle -83 handover -5 hands -28
hanging -5 hangs -37 happened -12 happens -39 happy -46 hard -26 hardest 41 hardly -45 has -28 hate
81 have -37 haven't 13 having 24 he -55 he's -19 head 11 heading 18 headings 36 hear -29 heard -8
hearing -34 heart -8 heating -11 heavy 21 held -27 hello -10 help -37 helpful 9 helps -42 her -60
here 72 hey 25 high -27 highest -9 hike -16 him -16 himself -39 hint 10 hints 66 hip 44 his -115
historical 60 history 70 hit -6 hobby -21 hold 18 holiday -50 home -107 honest -11 honestly -8 hope
22 hot -36 hotel -18 hour 57 hours -40 house 76 how 6 huge -30 hungarian -21 hurt -23 husband 17 i
-13 i'd 119 i'll -16 i'm 56 i've 34 idea -72 ideas 44 if 81 ignore -43 ill 17 image 12 imagine -21
impact -7 important 34 in 33 inches 25 include -30 included 113 includes 7 including 52 income -9
india 8 industry -40 information 10 initials 79 insists -33 install 22 instead 50 insurance -23
interested -30 interesting -41 intern -13 international 26 internet 64 interview -17 into 29
introduction -47 invest -5 investing -25 investment -29 investments -43 invoices 22 involved -17
iron -10 is 15 isn't -38 iso 73 issue 8 it's -45 italian -36 item -6 japan -17 japanese 46 jargon 69
job -29 jobs -35 joined -15 joke -32 jokes -32 journal 15 journey -12 juggle -5 jump -15 june -17
just -59 keep 73 keeping -45 keeps -11 kettle 60 key 43 keys -18 kid -6 kind 11 kinda -12 kindly -24
kit 7 kitchen -38 knees 36 know -66 known 18 knows -32 kosher 10 lab -8 label 71 lady -9 lake -27
land -84 landlord -44 language -6 languages -48 laptop -5 laptops -6 large 33 largest -16 last -29
late -11 lately 30 later 64 latex 36 latin 81 law 27 lawn -15 lawyer 13 lead -14 leader -12 leading
30 learn 7 learned -31 learning -15 lease -23 least -18 leaves 19 leaving -15 lecture 19 led -5 left
-71 lent -10 lesson 14 let -37 lets -54 letter -100 letters 126 level 45 libraries 29 library 92
licence -32 life -20 lift -22 lifting 26 light 39 lighthouse -64 like 69 liked -22 likes -22 limited
19 limits 33 line 70 lines 84 link 36 linkedin -22 links 48 linter -22 lisbon -67 list -37 lists 100
live 124 living -5 local -31 locally 23 location -19 lock -51 log -34 login -48 lol -42 long -58
longer -27 look 18 looked -78 looking -60 looks -12 lose -18 losing -14 lost 35 lot -24 love -79
lovely 19 loves -7 low -6 lower 6 lowercase 53 luck -27 lucky -7 lunch -50 m -102 machine 37
machines -19 mad 56 made 47 magic -6 mail -30 mails 37 main 8 major -46 make 16 makes 35 making 16
man -56 managed 20 manager -39 managing 26 many -49 march -17 mark 54 market -64 marketing 30 marks
19 married -21 master 40 match 52 math 72 matter 9 may -52 maybe -59 me 99 meal 29 meals 13 mean 54
means 146 meant -34 meat 25 medical 39 meeting -47 meetings -24 meets -5 members -31 memo -14 memory
-40 mental -10 mention 67 menu 9 merge -47 merger 52 message -72 messages -16 met 11 method 99
metres 43 metric 89 mg 68 middle 20 midnight -9 might 14 migration 37 mind 69 mine 23 minute 7
minutes -45 missed 59 missing -54 mistake 57 mistakes 15 mix 22 mixed -16 mla -5 mode -28 modern 69
mom -24 monday 38 money -22 month -46 months -32 more -12 morning -37 mornings -11 most -10 mostly
-10 mother -67 move -112 moved -14 moving -30 mr -12 ms -8 much -62 multiple -15 mum -16 mum's -12
museum 5 music -8 must 44 my -26 name 23 named 55 names 71 near -10 nearly -9 need 85 needed 5
needn't 59 needs 83 negative 7 neighbour -31 neighbours -16 nervous -21 net 6 network -8 neutral 22
new -104 news 37 newsletter -12 newspaper 44 next -28 nice 13 night -40 nine 55 ninety -5 no 86
nobody -60 nodes 37 non -36 none 61 normal 21 north 7 norway -33 not 97 notation 35 note -30
notebook -8 noted 8 notes 69 nothing 109 notice -72 novel -6 now -77 number 82 numbers 33 nurse 35
nuts -22 odd -44 off 54 offer 55 offered -22 offers -9 office -48 official 13 often -26 oh -12 oil
24 ok 68 okay -11 old 33 older -6 on -22 once -40 one -27 ones 98 online -20 only 49 op -16 open -10
opened -32 opening 14 opens 12 opportunities -21 option 40 or 88 order 98 orders -17 other -34
others -47 otherwise 77 ought 52 ounces 13 our 12 ours 16 ourselves -5 out 8 outside 25 overall -9
overwhelming -6 own -14 oxford 46 p 15 pack -29 package 7 packed -10 packing -8 page 5 pages 12 paid
-52 paint -24 pan 20 paper -27 papers -37 paragraph 7 paragraphs 83 parents -31 parish 25 park -17
parking -21 part -75 partner 32 parts 28 party 29 pass -18 passive 14 password 53 past 51 paste 25
patch -25 path -5 patient 25 patterns 16 pay -13 payment -6 pays -34 people -113 per 126 percent 49
perfect -24 permit 16 person 46 personal -23 perspective -22 philosophy -6 phone 17 phones -11 photo
49 pick -33 picked 20 picture -6 pictures 30 piece -65 pizza -47 place 33 plan 67 planning -36 plans
27 plant 23 platform -10 play 34 plays -6 please 32 plenty 69 plot 13 pls 72 plumber -13 plus -26
pnpm 22 poem -53 point 32 points -22 policy 38 polish -64 polite -22 politics 75 poor -42 pork 58
port -21 portfolio -13 position 5 possible 11 post -19 poster -30 potatoes -18 pounds 36 ppl -9 pr
-34 practical -5 practice 37 prefers -12 prepare -45 present -62 press 31 pressure -14 pretend -34
pretty -47 price 70 prices -25 print 55 printed 61 printer -22 private 42 problem -7 process -48
product 19 production 15 professional -8 professor -5 program -7 programming -7 project -46 projects
-25 promised 10 proof 30 proofread -59 propose 84 prose 52 proud -12 public 26 pull 30 purpose 42
push 56 put 81 puts -20 python -84 quarter -20 query -12 question 107 questions 74 quick -5 quiet
-10 quit 30 quite -46 quiz 63 quote 70 r 36 radio -12 rains -13 raised -18 ramadan 21 ran -10 random
27 range -19 rate 20 rates -10 rather 117 raw 8 reach -27 read 25 reading -16 reads 66 ready -11
really -12 reason -16 recently -5 recipe 27 recipes 106 recommend 100 record -45 recovery 40 red -31
refactor -22 refer 44 reference -47 regards 31 release -47 religion 28 remember 41 remind 14
reminder -14 rent -16 repeat 72 replies 28 reply 21 repo 37 report 12 reports 34 request 99 requests
57 require 81 required -11 research -49 resources 10 respect 14 response -57 responsible -6 rest 14
restaurant -19 returns -9 review -109 revolution -21 rewrite -54 rhyme -24 right 46 risk 29 river
-14 rn 14 role -16 roof -80 room -38 roommate -23 rooms -16 root -8 rough 29 round -14 router -18
row -17 rude -18 rule 156 rules 81 run 15 running 18 runs -11 rust 43 s -133 safe 15 safety 7 said
46 sale -20 sales -20 same 20 sat -10 saturday -7 saturdays -15 sauce 39 save -8 saved -35 savings
15 saw -26 say 42 saying 23 says -99 scale 41 schedule -48 schedules 59 scheduling -5 school -68
science -108 scratch -14 screen 46 script 11 search 21 season 53 seat -5 second 13 secret 15 secrets
27 section -9 security -17 see -45 seeing 57 seems -5 seen -36 semester -41 send 81 senior -35 sense
-12 sent -13 sentence -31 server -17 service 40 session -103 set -87 sets -9 setting -70 settled 21
seven 36 shall 23 shape -9 share -29 shared 45 she -63 she's -28 shed -20 sheet -33 shelter 22 shift
14 shoes -21 shop 48 shopping -49 shorten -24 shorter -32 shot 37 should 152 shoulder 42 shouldn't
74 show 78 shower -35 shown -17 shows -7 sick -30 side 58 sign 72 signature 41 signed -69 signing
-20 signs -35 simple -85 since 20 single 27 sister -68 sit -5 sits 14 sitting 31 six -47 size -31
sizes 54 skip 65 slack -28 sleep -53 sleeps -20 slides 9 slow 8 smaller -10 so 188 social -42
society 29 sold -7 solutions 68 solve -64 some -46 somebody -32 someone -62 something -7 sometimes
-55 somewhere -5 son -14 song -16 soon -34 sorry -6 sort 17 sound -21 sounds -17 soup -28 source 99
sources 100 space 13 spaces 74 spanish 5 spare 62 speak -27 speaks -22 special -46 specific -8
speech -25 spell 69 spelling 80 spend -30 spent -15 split 48 spoke -16 sports -13 spot -14 spring
-37 sql 78 stack -6 stage -20 stairs -46 stand -47 standard 17 standing -23 stands 51 star -18 start
28 started -56 starts -5 startup -75 state -52 statement -8 station -13 statistics 29 status 36 stay
-83 staying -32 stays 102 step 74 steps 31 stick 110 still 12 stock 8 stomach 8 stop 45 storage -5
store 6 stories 86 story 58 straight 11 strategy 18 streaming -15 street 9 strict 63 strong -14
student 19 students -71 studies -5 study -16 studying 30 stuff 79 style 43 subject 15 subscription
-23 success -41 sugar -69 suggest -20 suggestion -23 suggestions 77 sum -26 summarise -71 summarize
-49 summary -75 summer -65 sunday -55 sundays -9 super -21 supplier 53 support -12 supposed -19 sure
60 surname 8 surprised -33 swear -34 swim 15 swimming -9 swiss 22 t -107 table -128 tables 45 tabs
48 tag 10 take -24 takes -10 taking -7 talent -13 talk -60 talking -42 tastes 40 taught -9 tax 22
tea -58 teacher -14 teachers -12 team -5 teamwork -54 tech -50 technical -21 technologies -16
telephone 33 tell 109 telling 27 tells -23 temperature 30 ten -113 tend 79 tense 45 tent -8 term -42
terms 35 test 47 tests 31 texas 19 text 33 texts 63 than 74 thank -62 thanks -12 that -29 that's 32
the -115 their -106 them 71 then 29 there -99 there's 31 these -90 thesis 31 they -72 they'd -18
they're 19 they've -43 thing 43 things 73 think -31 thinking -21 thinks -12 third 13 thirty 45 this
-198 those -33 though -91 thought -39 thousands 72 three -67 threw -10 through 41 throughout 26
thursday 21 ticket 65 tickets -5 tight -10 til 36 time 63 times 53 tiny 48 title 99 to -43 toast -9
today -47 together -87 tomatoes -14 tomorrow -26 tone -17 tonight -24 too -13 took -50 tool -18
tools 33 top 66 topic 45 topics 30 total 5 touch -24 tour -20 town -50 trace -18 track -28 trade -26
tradition -19 traditional 24 traffic 31 train 87 trains 28 transaction -10 transfer 35 translate 22
travel 68 treat 75 tried -23 tries -6 trip -52 trips -13 true -14 trust -48 try -34 trying -24
tuesday -13 turn -122 turned -30 turning -9 turns 9 twelve -18 twenty -7 twice -36 two -9 type 44
typing 79 u 141 uncle -36 under 73 understand -63 understood -14 unit -37 units 21 university -10
unless 152 until 42 up -5 update 67 updated 39 upon -34 us 86 usa 16 use 90 used -6 user 128 users
-7 uses 33 using -16 usually -51 value -22 values 39 van 17 variables 85 vat 23 vegan -49 vegetarian
-8 vendor 20 version -36 very -65 vet -5 vibe 44 vicar -9 video -64 view 17 village 32 virtual -8
visit -28 voice 21 vote -11 w 88 wait 43 waiting -14 walk -52 walking -11 wall 81 walls -43 want -25
wanted -66 wanting -9 wants -50 war -23 ward 63 warehouse -12 warm 39 warning 27 was -9 watch -17
water -37 way 60 we 33 we'd -60 we're -14 we've -50 web -9 wedding -48 week -30 weekend -56 weekly
-19 weeks 30 weight 65 weird 11 well -45 welsh 35 went -25 were 5 what 28 what's 43 whatever -6
wheelchair 22 when 78 whenever 69 where -10 wherever 98 whether 8 which -23 while -74 white -12 who
-105 whoever -20 whom -18 why -89 wide -12 wife -17 wild -25 will -60 window -21 windows 31 wine 110
winter -12 wish 54 with 74 within 20 without 34 woman -5 won -19 won't -66 word 68 words -18 work
-35 working -93 workout 9 works -44 world -21 worried -8 worst -31 worth -32 wouldn't 46 wow -28
wrapped 12 write -21 writes -34 writing -39 written -7 wrong -99 wrote -21 yeah -7 year -20 year's
-11 yes 39 yesterday -36 yet -30 york 9 you -23 you'd 125 you're 32 you've -20 young -21 younger -7
your 73 yourself -70
"""
_PARTS = _SIGNS.split()
WEIGHTS: Mapping[str, int] = dict(zip(_PARTS[::2], map(int, _PARTS[1::2]), strict=True))
