"""Weights of the signs of standing instructions in other languages than English.

They are hundredths of log odds, made by `python -m recipes.instructions.languages`; signs are
those of `other_instructions.signs_of`.
"""

from __future__ import annotations

from collections.abc import Mapping


def _weights(listed: str) -> Mapping[str, int]:
    parts = listed.split()
    return dict(zip(parts[::2], map(int, parts[1::2]), strict=True))


BIASES: Mapping[str, int] = {
    "German": -571,
    "French": -605,
    "Spanish": -580,
    "Italian": -605,
    "Portuguese": -616,
    "Dutch": -534,
    "Chinese": -586,
}
SIGNS = _weights("""
=^address 54 =^always 6 =^asks -99 =^every 108 =^form 193 =^if 117 =^lasting 106 =^manner 45 =^need
16 =^no 106 =^once -147 =^only 70 =^other -56 =^past 9 =^people -31 =^self -120 =^thanks -150 =^this
-124 =^use 10 =^wish -22 =address 106 =always 151 =asks -7 =at-most-12 67 =at-most-18 184
=at-most-26 31 =at-most-5 -79 =every 57 =form 115 =if 111 =lasting 57 =manner 89 =need 49 =no 118
=once -119 =only 54 =past -74 =people -66 =question -230 =rules 34 =self 8 =thanks -54 =this -86
=use 70 =wish 14 address&asks 32 address&every -33 address&form -115 address&if 33 address&lasting
76 address&manner -86 address&no 70 address&once -17 address&only -61 address&past -58
address&people 9 address&question -33 address&self 71 address&thanks 20 address&this 7 address&use
33 address&wish 48 always&asks -50 always&every -30 always&form 133 always&if -175 always&lasting 35
always&manner -25 always&need 21 always&no -72 always&once 111 always&only 12 always&past -21
always&people -57 always&question -18 always&self -100 always&thanks 7 always&this 18 always&use 71
always&wish 90 asks&every 23 asks&form -28 asks&if 28 asks&lasting -28 asks&manner -36 asks&need -21
asks&no 29 asks&once 7 asks&only 5 asks&past -26 asks&people -33 asks&question -139 asks&thanks -12
asks&this -14 asks&use 22 every&form 180 every&if -49 every&lasting -81 every&manner 20 every&need
54 every&no 11 every&once 154 every&only -38 every&past -36 every&people -61 every&question -25
every&self -95 every&thanks 18 every&this 60 every&use 113 every&wish 45 form&if -41 form&lasting 84
form&manner -19 form&need 123 form&no 29 form&once -70 form&only -25 form&past 22 form&people -88
form&question -45 form&self -37 form&this -73 form&use -72 form&wish 56 if&manner 11 if&need 6 if&no
-29 if&once 27 if&only 19 if&past -9 if&people -52 if&question -79 if&self 20 if&this 41 if&use 110
if&wish 58 lasting&manner 30 lasting&once -13 lasting&only 83 lasting&past 27 lasting&people -34
lasting&question -31 lasting&self -44 lasting&this 69 lasting&use 23 lasting&wish -35 manner&need 45
manner&no 47 manner&once -84 manner&past 92 manner&people 10 manner&question -23 manner&self 28
manner&thanks -10 manner&use 6 manner&wish 36 need&no 23 need&only 29 need&past 36 need&people -124
need&question -23 need&self 71 need&this 16 need&use 16 need&wish 75 no&once -27 no&only 39 no&past
-6 no&people 58 no&question -60 no&self 18 no&thanks 21 no&this -155 no&use -9 no&wish -13 once&only
-38 once&people 25 once&question -7 once&self 21 once&thanks -10 once&this -24 once&use 32 once&wish
-118 only&past 15 only&people -157 only&question -18 only&self 76 only&this -15 only&use 25
only&wish 65 past&question -6 past&self -60 past&thanks -14 past&this -24 past&wish 106
people&question -21 people&self -8 people&thanks 55 people&this 52 people&use -46 people&wish -29
question&self -9 question&use -73 question&wish -41 self&thanks 7 self&this -7 self&use 30 self&wish
87 thanks&use -12 thanks&wish -25 this&use -28 this&wish -97 use&wish -28
""")
WORDS = {
    "German": _weights("""
! 9 , 43 . 20 : 32 ? -83 ab -16 abend 33 aber -47 absat 13 alle -13 allem 34 allen 20 als 53 also 95
alter 11 an 9 ander -61 anfan 12 antwo 57 arbei 25 arzt -13 auch 35 auf 14 aus 7 ausge 21 aussc 21
auto 28 bei 42 beim -5 benut 30 berec 67 beric -19 besse 45 beste -30 betra -29 bevor 43 bewer 21
bilde -31 bin 87 bis -8 bist 26 bitte 47 bleib 45 brauc 18 brief 31 buro -22 chef 15 dafur -30 dann
-6 darau -30 darf -32 das -74 dass -37 daten -11 datum -6 dauer 19 dem -71 den -43 der -47 deuts -26
dich 49 die -26 diese -23 dir 66 drei -61 dritt -32 du 27 durch 49 ehrli -13 ein -31 eine -21 einem
25 einen -24 einfa -6 ende 43 engli -38 er -15 erkla -7 erst -5 erste -41 es -8 etwas 6 fahre -57
falsc -22 farbe 31 forma -44 forme 23 fremd 14 freun -33 fruh -6 fruhs -17 fuhre -8 funf -22 fur -9
furs -16 ganz -25 gedic -11 gegen 13 gehor 15 geht 18 gende 32 gerad -9 gern -5 gesch 33 gib 20 gilt
19 gleic 13 gross 34 grund 28 gut -6 hab -16 haben 36 halte 39 hat -33 hatte -22 hause -14 heiss 20
hier 8 hunde -8 ich 21 im -56 immer -38 in 30 ins -7 ist 9 ja -19 jahr -15 jahre -14 jede 11 jedem 9
jeden -14 jeder 6 jedes -17 jetzt -36 jewei 49 kaffe -12 kann 22 kein 67 kilom 12 kinde -28 klass 7
klein 14 kling -7 komme -25 kommt -23 konnt 7 krank 34 kurze 42 lang -20 lange 12 laut -8 laute -15
lehre -13 liefe -20 liegt -17 liest 30 liste -9 lohnt -6 mach -11 mache -35 macht -14 mag -39 mai
-11 mal -38 man -80 mehr -10 mein -63 meine -42 mich 82 miete -6 mir -67 mit 77 mitte -16 mocht 57
muss -19 nach 10 nacht 10 namen -11 neben 10 nehme -17 nenn 14 nenne -8 nennt -20 nicht 29 nie 5
noch -46 nur -17 ob -25 ohne 21 oma 25 perso -22 progr -6 punkt -39 pytho 15 rechn -40 recht 52
rezep 20 sag -14 sagt -10 satz -17 sauer -17 schla -31 schle -27 schlu 19 schon -25 schre -7 schri
-34 sechs -24 sehen 26 sehr -22 sein 19 seit -40 selbs -8 sich -6 sie -37 sind -18 sitze 7 so 9 sohn
-17 soll -19 somme 20 spalt -10 sprac 28 sprec -11 stadt -6 statt 38 stehe 36 steht -41 stell -71
stets 16 strei -30 telef 16 texte 21 tocht -30 ton 12 train -25 trink -12 tun 34 uber -21 ubers -24
uhr 26 uhrze 36 um -24 und 13 ungef -5 uns -49 unser 21 unter 33 urlau -39 varia -6 verla -11 versc
-20 verst -41 vertr -36 verwe 21 viel -23 vier -19 vom 34 von 21 vor 21 vorsc 18 vorst 13 wande -12
war -39 warum -11 was -29 weg 25 weite -39 wenn -18 wer -8 werde -38 wie 39 wiede -30 will 77 wir
-37 wird -11 woche -27 worte 11 wunsc 27 zahle -17 zehn -34 zeigt -9 zeile -31 zu 41 zukun -29 zum
-50 zur -7 zusam -35 zwei -44 zweit -28 zwolf -26
"""),
    "French": _weights("""
! -10 , 96 . 35 : 54 ? -64 a -46 accen 56 accor 9 affic 8 age 14 aime -38 aller -6 alors 65 angla 21
annee -20 ans 31 appel 12 apres 10 arret -14 arriv -14 au -63 auber 17 aucun 36 aussi -15 autre -10
avant 32 avec 97 avis 25 beau -10 bibli -8 blanc -17 bonne -11 breto -11 budge -7 burea -8 c -34 ca
9 cafe -27 ce 6 ces -5 cette -10 chauf -15 chef 12 cherc -8 chez 50 chiff -27 chose 27 cinq -61
clien 24 code -7 colle -9 comma 9 comme 43 compl 23 compo -10 compr 17 compt -8 conse 6 conti -36
corri 13 coupe -11 court -9 crois -50 d 59 dans 49 de 42 debut 15 demai 18 deman -29 depui -25 des
46 desor -9 deuxi -16 diffe -21 dire 61 dis -20 dit 54 dix -52 dois -37 doive 11 donc 69 droit -7 du
-29 ecrir -24 ecris -7 elle -23 en 67 encor -25 enfan -9 entra 27 entre 17 envir -11 erreu -5 es 52
essai 36 et 81 etait -13 etre -5 euros 16 evite -33 exemp 12 exige -33 expli 21 fais -64 famil -32
faut 63 faute 13 femme 17 fille -10 fils 18 forma 9 forme 23 formu 7 franc 32 garde 24 grand -17
heure -50 ici -14 il 10 inter 35 j 36 jamai -39 je -7 jours -23 kilom 24 l -43 la -113 le -88 les
100 lettr 35 liste 9 lit 21 long -19 m -33 ma -63 maint -23 mais -60 mal -12 mange -17 march -12 me
29 medic 41 meme -38 merci 8 mere -15 mes 26 mets -57 mettr 6 moi 22 moins -6 momen 8 monde -16
monta 5 mots 7 n -49 ne -79 nom 12 non 35 notre 29 nous -17 on -19 ont -5 or -20 ordin 10 panne -10
parag -13 paren -17 parle -46 pars 33 parti -13 pas 32 passe -41 pense 11 pere -16 perso -17 peu -37
peux 7 phras -11 plait -16 plant -8 plus -35 point -15 porte -17 pour -23 pourq -13 pourr 7 pourt
-17 prefe -22 premi -27 prend -43 prof 10 progr -19 qu -23 quand 7 quatr 8 que 30 quelq 7 quest 54
qui 8 regar -9 regle 24 repon -13 reste 13 rien 53 s -8 samed -30 sans 35 se -69 semai -13 ses -17
seule 68 si -20 simpl 28 soien -15 soir 28 sois 7 somme 33 son -23 sont 19 sourc 54 sous 25 suiss 27
sujet -23 sur -44 surto -6 t 15 te 25 tempe 21 temps 17 tes 14 the -11 titre -37 tombe -9 ton 27
toujo 16 tous -80 tout 68 tradu 7 trava -8 trois -73 trop -24 trouv -16 tu 49 tutoi 8 un -33 une -41
utili 48 veut 36 viens -14 voitu 26 vous 69 vouvo 13 y -12
"""),
    "Spanish": _weights("""
! -8 , 73 . 33 : 19 ? -72 a 69 abajo -21 abuel -13 acabo -24
adela -10 ahora 12 al -119 algo 12 alqui -5 ano -21 antes 48
apaga -29 aqui 79 asi 107 aunqu -37 bibli -20 cafe -25 cambi
-12 capit -13 carta 55 carte -25 casi 13 cinco -40 clien 61
coche 8 codig -12 coleg -28 comen 7 como 21 compa -9 con 64
conmi 36 conse 22 conte -24 contr -24 convi -9 corre -14
corri 31 corta -8 corto -9 creo -51 cuand 46 cuant 10 cuent
16 cumpl -13 da -26 dame -37 dar 48 de 57 debe 16 deber -6
decim 51 deja 42 del -25 demas -32 desay -5 desde 35 despa
27 dia -15 dias -15 dice 21 dicen -18 diez -8 difer -26 dime
-35 discu -36 donde -8 dos -7 duerm -32 edad 34 ejemp 15 el
-105 empez 22 en 57 encar -5 ensay -7 entie 15 entre -23
equiv 9 eres 84 error 7 escri 35 eso -38 espan -13 esta -41
estan -12 este -11 estoy -37 euros 22 evita 13 expli 61
facil 13 favor -60 fecha -26 final 10 forma 31 fotos -24
fracc -16 frase -15 fuent 35 gato -9 graci 29 gusta -20 ha
-20 habla -83 hace -8 hacer -20 hago -29 hasta -8 hay -79
haz -18 he -47 herma -9 hijo 17 hora -40 horas 22 image 5
impor -6 inclu 41 indic 21 ingle 10 inter 48 jamas 25 jerse
-8 kilom 47 la -70 larga -76 las 23 le 22 leche -11 lee 59
leer 7 levan -34 libro -12 linea -45 lista -23 llama 83
llega -30 lleva -8 lo 28 los 56 madre -35 mal -59 manan 26
manda 21 marid 20 mas 42 me -13 media -34 medic 85 menos -41
mensa 5 mes -16 mi 7 minut -9 mis 41 mismo -15 mucha -7
muest 32 mujer 27 nada 41 nadie -12 neces 8 ni 20 ningu 75
no -12 nos -19 nuest 32 numer -31 nunca -27 o -6 orden 30
otra -45 pacie -12 pagin -6 palab 25 panta -11 para -7 parra
-44 parti -29 pasa -22 paso -11 pedir 83 pena -30 permi 25
pero -54 perro -11 perso 35 plan -20 poco -33 pone -41 pongo
-28 por -35 preci -9 pregu 16 prese 31 prime -24 princ 39
profe 18 progr 12 pueda 14 puedo -34 punto -11 que 45 queda
-44 quier -21 recet 5 redac -5 respu 42 ruido -11 sabes 48
sale -11 se -52 segun -60 seman -16 ser -16 si 17 sigue -12
sigui 58 sin 37 sirve 5 sobre -19 solo 34 somos 42 son 46
soy 19 su -33 suena -6 tabla -8 te -10 tenem 21 testi 12
texto -34 tiene 15 titul -55 toda -20 todas -11 todo 29
todos -57 traba -6 tradu 20 trata -7 tres -35 tus 8 tutea
-26 un -81 una -97 usa 17 usted 7 va -33 van 61 veint -27
ver -25 verde -6 vez -15 viene -9 vivo -6 voy -26 yo -33 ¿
-72
"""),
    "Italian": _weights("""
! -21 , 110 . 32 : 7 ? -32 a -42 abbia 52 adess -7 ai 17 al -25 alla -43 alle -17 allen 16 anche 37
ancor -48 anni -14 anno -24 aster 16 avant 9 bambi 29 bene -6 bisog -19 c -28 calco 30 capis -30
capit 7 capo 23 casa -8 cento 9 che 44 chiam 20 chied 9 ci -26 cinqu -32 clien 78 col -10 come 43
comme 15 compl 43 con 112 conti 6 contr -18 conve -20 corre 44 corto -15 cosa -27 d -10 da 26 dammi
-30 dare 21 dei -12 del -13 della -13 delle 18 deve -36 devon 10 di 54 dieci -43 dimmi -42 dire 15
doman 22 dopo -35 elenc -24 era -19 error 25 esemp 45 euro 27 evita 10 fa -31 facci -12 fai -22 fare
24 farma 13 favor -53 figli -17 fonte 16 forma 38 frase -17 funzi -9 giorn -7 gli 42 grazi -9 ha -35
hai -11 ho 9 i 28 il -83 immag -16 impor 8 in 19 indic 37 inizi 26 io -10 itali 9 l -80 la -48 lasci
-18 lavor -21 le 78 lei 52 lette 65 lingu 15 lo -56 lungo -29 ma -76 macch 11 maggi -8 mai -86 mangi
-11 marit 51 massi -6 medic -7 meno -51 mette 12 mi 6 miei 40 migli -13 mio 13 mostr -10 ne 10 nel
85 nessu 49 nient -36 no -31 nomi 6 non -53 numer -10 o 11 ora -69 parag -19 parla -51 parol 19
perso 25 piacc -72 piano 22 piu 49 po -36 poi -18 porta -13 prend -27 prese 28 prete -21 prima 45
propo 22 punti 26 puoi 8 qualc 27 quand 25 quatt -12 quell 6 quest 34 quind 21 ricet 10 riga -43
rigua -27 risca -19 rispo 35 sbagl -51 scrit -30 scriv 19 se 9 secon -38 sei 82 sempr -11 senza -14
serve 8 setti -12 si 50 siamo 30 siano -12 sii 8 since -39 solo -8 sono 7 spieg 53 stare -12 stess
-40 sto -9 su -30 sul -21 sulla 20 sulle -12 testi 11 testo -16 tieni 33 titol -18 tono 34 tradu -6
tre -39 tropp -50 tu 14 tutte -37 tutti -65 tutto 18 un -131 una -58 usa -31 va -26 vanno -13 vicin
-12 vogli 12 volta -27 vorre -7
"""),
    "Portuguese": _weights("""
! -23 , 99 . 12 a -49 agora -32 algo 12 amanh -20 ano -10 anos 12 antes 45 ao -11 apena 17 as 55
assim 14 ate 31 avo -20 bom 19 brasi 13 cada 40 cafe -14 carro 14 carta 35 chama 7 chefe 13 chega
-34 cinco -20 clien 57 codig 19 com 17 comec 18 comen 31 comig 72 como 37 consi 22 const 31 conti
-12 contr -42 conve -30 corri 32 crian -7 curta -7 da -48 daqui 18 dar 23 das -14 de 33 deixa -39
deixe 7 desde -13 deve -7 dez -17 dias -21 do -58 dois -32 duas 60 e 49 ela 22 em 54 empre -14 enten
9 entre -25 errad -72 erro -9 escol -24 escre -30 escri 42 esta 23 este -37 estiv -19 eu -55 euros
28 exemp -12 expli 35 fala -28 falar -12 favor -29 filho 28 fonte 14 forma 40 formu 33 franc 20
frase -27 gosta -7 ha -14 hoje -6 ingle 32 isso 31 jamai 76 leito 14 ler 12 lingu 16 linha -42 livro
-19 longa -13 longo -27 lugar -6 mail -6 maio -21 mais -24 marca 33 mas -52 maxim -52 me 85 medic 29
menos -67 mesmo -51 meus 27 mim 20 minha 16 muito -11 mundo -27 na -64 nada 41 nao -45 nem 38 nenhu
70 no 11 noite -6 nome 7 nomes 17 nos 15 nossa 63 nosso 17 novo -40 num -10 numer 22 nunca -92 o
-139 obrig 12 os 110 pagin 38 palav -9 para -76 parag -51 passe 9 pedir 74 pergu 31 pesso 43 por 18
porta 17 portu -5 pouco 13 preci -15 prime 8 procu 12 quand -14 quatr -9 que -17 quem 13 quer -7
queri -46 quero 38 quilo 36 recei 5 respe -10 respo 41 resum 5 sabe 19 sao 90 segun -49 seja -29
sejam -18 sem 43 seman -7 sempr 57 senho -13 ser 26 so 19 sobre -23 somos 23 tabel -8 tem -20 tempe
42 termo 5 texto 19 titul -25 toda -38 todo -13 todos -49 tom 5 traba -43 tradu 13 trata -18 trein
21 tres -56 tudo 32 um -27 uma -50 usa -17 use 35 vez 21 voce 7
"""),
    "Dutch": _weights("""
! -15 , 111 . 60 : 66 ? -42 aan 30 al -14 aline -9 alle -15 allee 11 alles 60 als 27 altij -36 antwo
13 auto 22 avond 34 baas -41 bedra -10 beetj -47 ben 26 bent 70 bij 14 blijf 42 brief 15 code -9
comme -7 contr -7 daar 6 dan 50 dat -40 datum -36 de -137 denk -12 deze -24 die 22 dit 52 docht 18
doe -5 door -6 drie -67 duide 18 dus 107 een -68 eerli -58 eerst -12 elk -44 elke -12 en 13 er 17
formu 16 fout -8 funct -7 ga 9 gaan -6 gebru 29 geef -27 geeft -12 geen 25 gestu -7 geven 20 graag
-37 haar -41 hebbe 26 heeft -13 heet 46 hele 41 het -48 hij -21 hoe -36 hou 11 ik -49 in 57 is -110
jaar -62 je 26 jij 40 juf 16 kan -11 kanto -14 keer -13 kinde -8 klant 35 kort -18 korte 33 krijg
-37 kunne -24 laat 22 lang -12 lange 32 laten -21 leest 45 leg 26 leraa 18 lette 55 lieve 24 lijst
-19 lopen -20 maar -59 mag -20 mail -11 me 100 medic 16 mee 56 mei -14 met 126 mijn -10 moet 10
morge 46 naar -61 namen 9 neder -40 nee -43 nemen -16 niet 20 niets 121 niks -10 nodig -16 noem -59
nog -23 nooit -31 nu -41 om -28 ons -46 onze 25 ook -27 op -10 over 7 overa 37 praat -38 progr 5
pytho -5 recep 6 regel -16 reken -12 s 57 samen -12 sinds -33 solli -13 spree -31 staan 37 staat -33
steed 31 te -17 tegen 55 tekst -34 tien -45 tijd -46 toon 53 tot 14 tusse 17 twee 16 u 14 uit 68 uur
-36 van 32 varia -7 verbe 25 vermi 26 verta 86 verte -16 vier -18 vijf -19 voor -27 voorb -7 voord
-27 voort -6 vraag 17 vrien -32 waaro -5 was -9 wat -8 we -8 wees 16 weet 24 welk -18 werk 9 wij 73
wil -29 woord 10 word 9 worde 39 wordt -34 ze 61 zegge 49 zei -5 zet -9 zijn 22 zin -58 zinne 37 zo
28 zonde 44 zou 29
"""),
    "Chinese": _weights("""
“ 98 一 -41 一个 19 一句 -36 一律 27 一点 -6 一百 -11 一直 -34 一起 18 七 16
三 -31 三个 -7 三句 -10 上 -26 上学 -15 上班 -13 下 -28 不 -6 不了 16 不出
-18 不喜 12 不好 6 不对 -12 不是 -29 不用 8 不知 -11 不能 14 不要 48 不让 10
不许 -14 专 -7 专业 -7 业 -26 东 9 两 10 两个 12 个 -37 个人 23 个月 -10 中
23 为 33 主 8 么 -28 么办 -8 么都 -11 之 10 之前 16 九 -5 书 -54 了 -80
了我 14 事 -8 二 -21 二天 44 于 -27 五 -84 些 -17 交 -19 亲 41 人的 6 什
-24 什么 -24 从 -43 从来 -36 他 -8 他的 7 代 -9 代码 -9 以 9 以前 24 以后
-65 们 21 们家 22 价 -6 任 16 任何 16 位 -5 住 20 体 -8 何 16 作 -7 你 67
例 -20 例子 -20 保留 24 信 15 候请 10 借 -7 做 -21 做一 -9 停 -41 儿 -49 先
14 入 -27 八十 6 公 11 公司 -14 公里 42 六 -15 关 -33 关于 -26 其 7 养 -20
再 -25 写 27 写一 -20 写了 -12 写的 14 准 -8 减 -10 出 -16 划 -14 刚 -6 别
58 别用 6 到 -24 刷 -7 前 36 办 -12 加 -5 动 -23 区 -20 医 -35 十 -20 半
-16 博 5 去 -63 去了 -8 反 16 发 -10 受 -19 口 -8 句 -37 句子 9 句话 -20
另 11 只 13 只写 -6 只能 6 叫 19 可 -9 号码 -37 司 -14 吃 -25 合 -12 合同
-7 同 -15 名 27 名字 -59 吧 6 听 -14 吵 -15 告 -27 告诉 -14 员 -13 周
-11 和 15 咖 -26 咖啡 -26 品 68 哪 -41 啡 -26 喜 -13 喜欢 -13 喝 -7 器
-13 四 -36 四个 7 回答 10 团 -25 园 -5 国 -6 图 -16 图片 -12 在 -48 在写
-13 在我 7 地 6 场 -21 块 -6 坚 -26 外 -7 多 -28 夜 39 大 -43 大家 -20
大概 -17 天 -13 天的 -11 太 -6 太长 -6 头 -15 女 17 女儿 10 奶 -6 奶奶 -6 她
-25 好 -50 妈 -11 子 -63 字 -30 学 -17 学的 -24 它 -18 安 -21 定 17 实
-12 客 25 客户 34 害 -17 家 -25 家都 -20 对 94 对我 26 小 64 少 -11 就 7
就不 34 就是 -13 尿 -8 居 -8 屏 17 岁 20 州 -8 工作 -13 己 -11 师 -30 带
-32 帮 -23 帮我 -10 常 -25 平 -14 平时 -11 年了 -21 床 -6 序 -17 库 6 应
-48 应该 -30 底 -17 度 34 建 8 建议 25 开 11 开车 10 式 25 引 26 张 -6 律
58 律用 11 得 -10 必 6 必须 6 怎 -29 怎么 -29 怕 -46 总 -7 总是 -25 您 -15
想 -49 意 24 慢 15 成 -21 我 48 我一 25 我们 27 我在 -18 我妈 -11 我对 16
我想 -41 我是 11 我爸 -8 我的 12 我看 11 我老 28 我说 45 户 34 房 -19 房东 -8
所 -10 所以 16 所有 -35 手 15 才 -16 打 -16 找 -18 把 -30 把这 -6 报 -45
拿 6 持 -25 挂 -19 按 47 挺 -8 换 -23 掉 -24 排 -16 推 29 推荐 29 提 67
提醒 6 搬 -25 放 -9 敏 17 教练 -7 敬 12 数 38 数字 27 整 21 文 -40 方 51 日
-19 时 14 明天 39 是 -47 是不 -23 显 -9 显示 -9 晚 24 晚上 29 更 -36 最 39
最后 64 最近 -12 月 -34 有 -30 有一 20 有个 -13 服 12 本 8 机 7 来不 -28 来没
-9 板 -13 林 11 查 -13 标 16 样 16 案 17 检 -10 楼 -12 概 -7 次 19 次都
52 欢 -13 款 9 正 23 死 -5 段 -18 母 -8 每 5 每天 -14 每次 30 比 -17 气
-18 水 -17 永 -20 永远 -20 求 -44 池 -41 没 -75 没有 26 法 -7 法律 22 注
-8 注释 -8 海 -20 清 7 火 -5 炉 13 点 -19 爬 6 爸 -8 片 -39 版 -5 牌 13
特 -22 特别 -22 狗 -21 现 -20 现在 -19 班 28 理 24 理由 25 生 6 生日 -6 用
83 用英 13 用表 -7 由 25 电 -21 电池 -40 电话 11 留 24 病 15 病人 16 白 -8
百 -22 的 41 的公 10 的文 -10 的是 -13 目 10 直 18 看 31 看一 -5 真 -48 着
-57 睡 -14 知道 -11 短 -9 短一 -19 码 -59 碍 6 示 -9 票 -9 秋 -10 种 -9
租 -7 租客 -7 税 28 空 7 章 -13 第 7 第一 -21 第三 8 第二 20 答 -20 简 31
简单 20 算 11 箱 29 篇 -9 糖 -15 素 -11 红 -12 约 -8 结 11 给 -17 给她
-10 给我 15 绝 30 统 28 美 22 翻 8 翻译 8 老 -15 老师 -19 老是 25 老板 -13
考 -16 职 -24 胃 -8 能 19 能用 26 自 -14 自己 -11 色 -9 花 14 英 38 英文 6
英语 6 荐 29 药 21 菜 17 落 15 行 -26 表 -10 表格 -14 西 17 要不 -55 要提
30 要求 -44 要用 -14 角 35 计 -16 计划 -16 讨 16 让 -21 让我 -8 议 25 记得
-6 讲 15 许 -14 诉 -20 诉我 -7 试 11 话 52 该 -30 语 44 语气 7 说 -30 说我
-25 说的 25 说话 38 请 70 请用 8 谈 -14 负 7 负责 7 责 7 起 -12 跟 41 车 -9
边 -10 过 9 过一 7 近 -23 还 -15 还有 -6 这 -8 这个 18 这样 27 这段 -7 进
-17 远 -24 远不 -47 通知 7 道 15 那 -32 邮 -5 邻 -6 邻居 -6 都 11 都不 6
都用 -24 都要 -21 配 -14 酸 -12 醒 5 醒我 6 释 -9 里 -13 里不 -17 里都 16 量
38 金 -19 金额 -15 钱 -9 铁 -7 错 -27 错了 -35 长 8 长了 12 门 -11 问 28
问题 18 间 8 队 -21 院 -42 障 6 障碍 6 面 7 页 6 项 17 须 6 预 -5 题 57 额
-15 饭 -6 馆 -26 香 -5 默 14 ， 15 ： 20 ？ -79
"""),
}
